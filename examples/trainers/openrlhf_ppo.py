"""OpenRLHF's `train_ppo_ray` on leased groups: its trainer gets samples from the service. docs/trainers/openrlhf.md"""

import os
import runpy

import openrlhf.trainer.ppo_trainer as ppo_trainer
import openrlhf.trainer.ray as ray_trainer
import ray
from openrlhf.trainer.ppo_utils.experience import Experience

from trainer_client import TrainerClient
from trainer_client.adapters.openrlhf import experiences
from trainer_client.adapters.steps import Steps
from trainer_client.advantages import grpo

GROUPS = 16  # of a step; their rows: at least --train.batch_size, at most --rollout.batch_size


class LeasedSamples:
    """Has the one method of SamplesGenerator that training calls; as many steps as the prompts would have given."""

    def __init__(self, args, prompts):
        client = TrainerClient(os.environ["VERBATIM_URL"], os.environ["VERBATIM_TRAINER_TOKEN"])
        self.args, self.step = args, 0
        self.steps_per_episode = max(1, len(prompts.dataset) // args.rollout.batch_size)
        self.steps = Steps(client, GROUPS, max_staleness=4)

    def generate_samples(self, **_):
        saved = f"{self.args.ckpt.path}/global_step{self.step}_hf" if self.step else None
        batch = self.steps.take(saved)
        self.step += 1
        made = experiences(batch, Experience, advantages=batch.advantages(grpo))
        return made, None, self.args.rollout.batch_size, self.step % self.steps_per_episode == 0


@ray.remote
class LeasedTrainer(ppo_trainer.PPOTrainer.__ray_metadata__.modified_class):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.samples_generator = LeasedSamples(self.args, self.prompts_dataloader)


ppo_trainer.PPOTrainer = LeasedTrainer
ray_trainer.create_vllm_engines = lambda *_, **__: None
runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__")
