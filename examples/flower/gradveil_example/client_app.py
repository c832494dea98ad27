"""An ordinary Flower client; the mod given to `ClientApp` is all that protects its updates.

Nodes must be started so that they run only this app, see `run_deployment.py`: the server could send it without the mod.
"""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from gradveil.flower import defense_mod
from gradveil_example.task import DEFENSE, LR, load_share, make_model, train

app = ClientApp(mods=[defense_mod(DEFENSE, lr=LR, metrics=["loss"])])
torch.set_num_threads(1)


@app.train()
def train_round(message: Message, context: Context) -> Message:
    model = make_model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    images, labels = load_share(context.node_config["partition-id"], context.node_config["num-partitions"])
    loss = train(model, images, labels, context.run_config["batch-size"])
    metrics = MetricRecord({"num-examples": len(images), "loss": loss})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)
