"""What a strategy and its clients write into Flower's messages, and how the other side reads it."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from gradveil.core import checks
from gradveil.core.errors import InputError
from gradveil.defenses import Defense
from gradveil.update import Announced, Update, wire

INSTRUCTIONS = "gradveil"
LOCATIONS = "gradveil.locations"
UPDATE = "gradveil.update"
OUR_RECORDS = (INSTRUCTIONS, LOCATIONS, UPDATE)
WEIGHT = "num-examples"


def bytes_record(data: bytes) -> ArrayRecord:
    """Bytes as an array record, which Flower sends in chunks, so that an update may be of any size."""
    return ArrayRecord({"bytes": Array("uint8", (len(data),), "gradveil.wire", data)})


def bytes_of(content: RecordDict, key: str) -> bytes | None:
    """The bytes that were given to `bytes_record`; None: there is no such record."""
    record = content.array_records.get(key)
    if record is None:
        return None
    if list(record) != ["bytes"]:
        raise InputError(f"flower: expected one array of bytes as {key!r}, got {sorted(record)}")
    return record["bytes"].data


def model_arrays(content: RecordDict, whose: str) -> tuple[str, ArrayRecord]:
    """The only array record in a message that is not gradveil's own, with its key."""
    found = {key: record for key, record in content.array_records.items() if key not in OUR_RECORDS}
    if len(found) != 1:
        raise InputError(
            f"flower: expected one ArrayRecord, the model, in {whose}, got {sorted(found)}; "
            "arrays other than the model would be sent undefended"
        )
    return next(iter(found.items()))


def size_of(content: RecordDict) -> int:
    """The length of a message's records in bytes."""
    return sum(record.count_bytes() for record in content.values())


@dataclass(frozen=True)
class Instructions:
    """What a `GradveilStrategy` tells the clients of a round.

    Args:
        round: the number of the round, from 1.
        lr: the learning rate that turns an update into a step.
        defense: the defense that the clients must use.
        announce: whether an announcement is asked for instead of an update.
        used: the latest round in which the server used an update of this client, 0 if there is none; error feedback
            takes back what any later update carried.

    Example:
        >>> dict(Instructions(3, 0.1, "none").record())
        {'round': 3, 'lr': 0.1, 'defense': 'none', 'announce': False, 'used': 0}
    """

    round: int
    lr: float
    defense: str
    announce: bool = False
    used: int = 0

    def record(self) -> ConfigRecord:
        """The instructions as a record of a message."""
        return ConfigRecord(dataclasses.asdict(self))

    @classmethod
    def of(cls, message: Message) -> "Instructions | None":
        """The instructions in a train message; None: it has none."""
        record = message.content.config_records.get(INSTRUCTIONS)
        if record is None:
            return None
        expected = {field.name for field in dataclasses.fields(cls)}
        if set(record) != expected:
            raise InputError(
                f"flower: expected instructions {sorted(expected)} from the server, got {sorted(record)}; use the "
                "same version of gradveil on both sides"
            )
        return cls(
            checks.integer("flower", "the server's round", record["round"], low=1),
            checks.number("flower", "the server's lr", record["lr"], above=0),
            str(record["defense"]),
            checks.flag("flower", "the server's announce", record["announce"]),
            checks.integer("flower", "the server's used", record["used"], low=0),
        )

    def check_defense(self, defense: Defense) -> None:
        """Raise if the server expects another defense than the client's."""
        if self.defense != str(defense):
            raise InputError(
                f"flower: this client defends with {defense}, the server's strategy expects {self.defense}; "
                "use the same on both sides"
            )

    @classmethod
    def required(cls, message: Message) -> "Instructions":
        """The instructions in a train message; raise if it has none."""
        found = cls.of(message)
        if found is None:
            raise InputError(
                "flower: the train message comes from a server without GradveilStrategy, which could not read the "
                'update; wrap the strategy there, or use defense_mod(..., send="dense")'
            )
        return found


def announced(message: Message) -> Announced | None:
    """What the elected client of this round announced, for ``defense.share(..., announced=...)``; usually None.

    It comes through the server, so it is not trusted: whatever size it declares, no more is allocated than the model in
    the message takes, and only layers of that model are accepted.
    """
    data = bytes_of(message.content, LOCATIONS)
    if data is None:
        return None
    model = model_arrays(message.content, "the train message")[1].to_torch_state_dict()
    locations = wire.decode_locations(data, max_values=sum(value.numel() for value in model.values()))
    for name, value in locations.items():
        shape = list(model[name].shape) if name in model else "no such layer"
        if list(value.shape) != shape:
            raise InputError(
                f"flower: expected announced locations of the model's layers, got {list(value.shape)} for {name!r}, "
                f"which has {shape}"
            )
    return locations


def reply(message: Message, update: Update, defense: Defense, metrics: Mapping[str, float] | None = None) -> Message:
    """The answer to a train message of a `GradveilStrategy`: an update as bytes, for defenses that need the data.

    Args:
        message: the train message.
        update: what ``defense.share`` returned; its weight is the number of samples in its `meta`.
        defense: the defense that made it.
        metrics: metrics to send along; nothing protects them.
    """
    instructions = Instructions.required(message)
    instructions.check_defense(defense)
    figures = MetricRecord({WEIGHT: update.meta.samples, **(metrics or {})})
    sent = update_record(update, instructions, defense.locations(announced(message)))
    return Message(RecordDict({UPDATE: sent, "metrics": figures}), reply_to=message)


def update_record(update: Update, instructions: Instructions, locations: Announced | None) -> ArrayRecord:
    """An update as it is sent in this round."""
    sent = Update(update, dataclasses.replace(update.meta, round=instructions.round))
    return bytes_record(wire.encode(sent, locations=locations))


def announcement(message: Message, locations: Announced | None) -> Message:
    """The answer to a message that asks for an announcement."""
    content = RecordDict()
    if locations is not None:
        content[LOCATIONS] = bytes_record(wire.encode_locations(locations))
    return Message(content, reply_to=message)
