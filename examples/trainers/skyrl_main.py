"""SkyRL's trainer with the generator of skyrl_generator.py. docs/trainers/skyrl.md"""

import os
import sys

import ray
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.generators.base import TrajectoryID
from skyrl.train.utils import validate_cfg
from skyrl.train.utils.utils import initialize_ray
from skyrl_generator import VerbatimGenerator

from trainer_client import TrainerClient


class Experiment(BasePPOExp):
    def get_generator(self, cfg, tokenizer, inference_engine_client):
        client = TrainerClient(os.environ["VERBATIM_URL"], os.environ["VERBATIM_TRAINER_TOKEN"])
        return VerbatimGenerator(client, cfg.trainer.train_batch_size, TrajectoryID, exports=cfg.trainer.export_path)


@ray.remote(num_cpus=1)
def run(cfg):
    Experiment(cfg).run()


if __name__ == "__main__":
    cfg = SkyRLTrainConfig.from_cli_overrides(sys.argv[1:])
    validate_cfg(cfg)
    initialize_ray(cfg)
    ray.get(run.remote(cfg))
