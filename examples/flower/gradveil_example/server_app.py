"""An ordinary Flower server; the strategy is wrapped so that it reads the defended updates and refuses bad ones."""

import time
from collections import Counter

import torch
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from gradveil.flower import GradveilStrategy
from gradveil_example.task import DEFENSE, LR, accuracy, make_model

app = ServerApp()
torch.set_num_threads(1)


@app.main()
def main(grid: Grid, context: Context) -> None:
    config, model = context.run_config, make_model()
    while len(list(grid.get_node_ids())) < config["nodes"]:
        time.sleep(1)
    strategy = GradveilStrategy(FedAvg(fraction_evaluate=0.0), DEFENSE, lr=LR)
    result = strategy.start(
        grid, ArrayRecord(model.state_dict()), num_rounds=config["rounds"], timeout=config["round-timeout"]
    )
    model.load_state_dict(result.arrays.to_torch_state_dict())
    dense = sum(value.numel() * value.element_size() for value in model.state_dict().values())
    sent = sum(strategy.uploads) / max(1, len(strategy.uploads))
    print(f"accuracy {accuracy(model):.3f} after {config['rounds']} rounds under {DEFENSE}")
    print(f"a client sent {sent:,.0f} bytes a round; the whole model has {dense:,}")
    for node, count in Counter(fault.client for fault in strategy.faults).items():
        reasons = sorted({fault.reason for fault in strategy.faults if fault.client == node})
        print(f"node {node} failed in {count} rounds: {'; '.join(reasons)}")
