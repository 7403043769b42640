"""NeMo RL's policy and loss on leased groups: what its `grpo_train` does after generation. docs/trainers/nemo-rl.md"""

import os
from pathlib import Path

import torch
from nemo_rl.algorithms.grpo import MasterConfig
from nemo_rl.algorithms.loss import ClippedPGLossFn
from nemo_rl.algorithms.utils import get_tokenizer
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster, init_ray
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.utils.config import load_config, register_omegaconf_resolvers
from omegaconf import OmegaConf

from trainer_client import TrainerClient
from trainer_client.adapters.nemo_rl import train_data
from trainer_client.advantages import leave_one_out

GPUS, WEIGHTS = 8, Path("/shared/weights")

register_omegaconf_resolvers()
settings = load_config(Path("examples") / "configs" / "grpo_math_1B.yaml")
settings.loss_fn.reference_policy_kl_penalty = 0  # there is no reference model below
settings.loss_fn.use_importance_sampling_correction = True  # for the engine's logprobs
config = MasterConfig(**OmegaConf.to_container(settings, resolve=True))
init_ray()
cluster = RayVirtualCluster(name="verbatim", bundle_ct_per_node_list=[GPUS], num_gpus_per_node=GPUS)
tokenizer = get_tokenizer(config.policy["tokenizer"])
policy, loss = Policy(cluster, config.policy, tokenizer, init_reference_model=False), ClippedPGLossFn(config.loss_fn)
client = TrainerClient(os.environ["VERBATIM_URL"], os.environ["VERBATIM_TRAINER_TOKEN"])
version = client.weights()["current"]["version"]
multiple = GPUS * config.policy["train_micro_batch_size"]

for batch in client.batches(max_groups=16, max_staleness=4):
    with batch:
        data = train_data(
            batch, BatchedDataDict, pad_id=tokenizer.pad_token_id, advantages=batch.advantages(leave_one_out), multiple_of=64
        )
        while missing := -data.size % multiple:  # rows that are not trained, so that every GPU has as many
            filler = data.slice(0, min(missing, data.size))
            filler["sample_mask"] = torch.zeros(filler.size)
            data = BatchedDataDict.from_batches([data, filler])
        policy.prepare_for_lp_inference()
        data["prev_logprobs"] = policy.get_logprobs(data)["logprobs"]
        data["reference_policy_logprobs"] = torch.zeros_like(data["prev_logprobs"])
        policy.prepare_for_training()
        print(policy.train(data, loss, gbs=data.size))
        version += 1
        folder = WEIGHTS / f"version-{version}"
        policy.save_checkpoint(str(folder), checkpointing_cfg={**config.checkpointing, "save_consolidated": True})
        client.publish(next(folder.rglob("consolidated")), version)
