"use strict";
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const headings = [...table.tHead.rows[0].cells];
  const original = [...body.rows];  // ties keep the order of the audit, whatever was sorted before

  const compare = (a, b) => {
    const [x, y] = [Number(a), Number(b)];
    return Number.isNaN(x) || Number.isNaN(y) ? a.localeCompare(b, "en", { numeric: true }) : x - y;
  };

  const sort = (column, direction) => {
    const value = (row) => row.cells[column].dataset.value;
    const missing = original.filter((row) => value(row) === "");
    const present = original.filter((row) => value(row) !== "");
    present.sort((a, b) => direction * compare(value(a), value(b)));
    body.append(...present, ...missing);  // rows without a value come last in both directions
  };

  headings.forEach((heading, column) => {
    heading.querySelector("button").addEventListener("click", () => {
      const descending = heading.getAttribute("aria-sort") === "ascending";
      headings.forEach((other) => other.setAttribute("aria-sort", "none"));
      heading.setAttribute("aria-sort", descending ? "descending" : "ascending");
      sort(column, descending ? -1 : 1);
    });
  });
}

for (const charts of document.querySelectorAll(".charts")) {
  const tip = charts.querySelector(".tip");
  const hide = () => { tip.hidden = true; };
  const show = (point) => {
    const name = document.createElement("b");
    name.textContent = point.dataset.label;
    tip.replaceChildren(name, document.createElement("br"), point.dataset.detail);
    tip.hidden = false;
    const frame = charts.getBoundingClientRect();
    const dot = point.querySelector(".dot").getBoundingClientRect();
    const room = frame.width - tip.offsetWidth;
    tip.style.left = `${Math.max(0, Math.min(room, dot.left - frame.left + dot.width / 2 - tip.offsetWidth / 2))}px`;
    const above = dot.top - frame.top - tip.offsetHeight - 8;
    tip.style.top = `${above < 0 ? dot.bottom - frame.top + 8 : above}px`;
  };
  for (const point of charts.querySelectorAll(".point")) {
    point.querySelector("title").remove();  // the browser would show it as a second tooltip
    point.addEventListener("pointerenter", () => show(point));
    point.addEventListener("pointerleave", hide);
    point.addEventListener("focus", () => show(point));
    point.addEventListener("blur", hide);
  }
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
}
