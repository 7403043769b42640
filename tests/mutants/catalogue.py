"""All faults that are planted."""

from __future__ import annotations

from tests.mutants import in_contract, in_memo, in_proxy, in_reconstruct, in_rollout, in_store, in_trainer_client
from tests.mutants.fault import Fault

FAULTS: tuple[Fault, ...] = (
    *in_contract.FAULTS,
    *in_reconstruct.FAULTS,
    *in_store.FAULTS,
    *in_proxy.FAULTS,
    *in_memo.FAULTS,
    *in_rollout.FAULTS,
    *in_trainer_client.FAULTS,
)
