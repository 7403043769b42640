"""A generation: every input is attempted round by round until enough of its attempts are accepted.

A round is one task of the service, with an id made from the input's. The tasks are the only state: an interrupted generation submits
them again, which changes nothing, and continues from what the service says of them.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from urllib.parse import quote

from cli.archive_api import ArchiveApi
from cli.control import RequestFailed
from cli.generation.attempts import Accept, Attempt, Input, Progress, RoundPlan, judge
from cli.generation.folder import GenerationFolder, Spell
from cli.generation.screen import Screen, summarize, summarize_failures
from cli.refusal import CommandError
from cli.tables import count_ended
from contract.attempts import ENDED, Failure

POLL_SECONDS = 1.0


SAME_FAILURES = 3
"""So many attempts that fail alike, and none that does not, stop a generation."""
AGENTS_OWN = (Failure.HARNESS_FAILED, Failure.HARNESS_CRASHED)
"""Failures that a policy may cause, once it was called."""


def find_shared_failure(progress: Sequence[Progress], limits: RoundPlan) -> dict[str, str] | None:
    """The failure that all attempts so far share, if they are enough to expect it of the others: one if a harness is missing and all tasks
    use the same, otherwise SAME_FAILURES. None also if no others are to be made."""
    attempts = [attempt for each in progress for attempt in each.attempts]
    if not attempts or len(attempts) >= limits.most * len(progress):
        return None
    failures = []
    for attempt in attempts:
        failure = attempt.failure
        if failure is None or (failure["failure"] in AGENTS_OWN and attempt.values["calls"]):
            return None
        failures.append(failure)
    if len({(failure["failure"], _VARYING.sub("#", failure["message"])) for failure in failures}) > 1:
        return None
    same_place = len({repr((each.input.body["harness"], each.input.body.get("runtime"))) for each in progress}) == 1
    is_certain = same_place and failures[0]["failure"] == Failure.HARNESS_MISSING
    return failures[0] if is_certain or len(failures) >= SAME_FAILURES else None


_VARYING = re.compile(r"\d+|/\S+")
"""Numbers and paths, which differ between failures of one cause."""


class Generation:
    """`wait` sleeps for so many seconds, or less, and returns whether to stop. `spell` gives the text of a policy's token ids."""

    def __init__(
        self,
        api: ArchiveApi,
        folder: GenerationFolder,
        inputs: Sequence[Input],
        limits: RoundPlan,
        accept: Accept,
        screen: Screen,
        wait: Callable[[float], bool],
        spell: Spell,
    ) -> None:
        self._api = api
        self._spell = spell
        self._folder = folder
        self._progress = [Progress(each) for each in inputs]
        self._limits = limits
        self._accept = accept
        self._screen = screen
        self._wait = wait

    def run(self) -> None:
        """Raises `CommandError`, also if nothing was accepted. Whatever was accepted is written however it ends."""
        complete = False
        try:
            complete = self._run_rounds()
            if not complete:
                self._screen.say("stopping: what was accepted is written, and what was started is stopped")
        finally:
            conversations = self._write(complete)
        if complete and not conversations:
            raise CommandError(self._explain_nothing())

    def _explain_nothing(self) -> str:
        """Why there is no conversation."""
        if accepted := sum(len(progress.accepted) for progress in self._progress):
            how = "attempt was" if accepted == 1 else "attempts were"
            return (
                f"{accepted} {how} accepted, but no reply in them reached the harness, or all are of a model that is not trained, so "
                "there is no conversation"
            )
        return f"no attempt was accepted; {self._folder.path / 'rollouts.jsonl'} says why of each"

    def _run_rounds(self) -> bool:
        """Whether every input is done; False when stopped."""
        for progress in self._progress:
            self._submit(progress, self._limits.samples)
            if self._wait(0):
                return False
        while unfinished := [progress for progress in self._progress if not progress.done]:
            began = time.monotonic()
            for progress in unfinished:
                self._update(progress)
                if progress.done:
                    self._screen.report(progress)
                if self._wait(0):
                    return False
            self._screen.show(self._progress)
            if (failure := find_shared_failure(self._progress, self._limits)) is not None:
                self._give_up(failure)
            pause = max(0.0, POLL_SECONDS - (time.monotonic() - began))
            if not all(progress.done for progress in unfinished) and self._wait(pause):
                return False
        return True

    def _give_up(self, failure: Mapping[str, str]) -> None:
        """Cancel what has not ended. Raises `CommandError`."""
        for progress in self._progress:
            if not progress.done and progress.task_id:
                self._api.delete(f"/tasks/{quote(progress.task_id, safe='')}")
        self._folder.begin_anew()
        made = sum(len(progress.attempts) for progress in self._progress)
        count = "the first attempt" if made == 1 else f"all of the first {made} attempts"
        raise CommandError(
            f"{count} failed for the same reason, so no others were made. {failure['failure']}: {failure['message']} "
            f"(see {failure['look']}). Fix it and repeat the command: it begins anew"
        )

    def _submit(self, progress: Progress, samples: int) -> None:
        progress.round += 1
        try:
            task = self._api.post("/tasks", progress.input.make_task(self._folder.id, progress.round, samples))
        except RequestFailed as failed:
            if failed.status not in (400, 409):
                raise
            raise CommandError(f"line {progress.input.number}: {failed}") from failed
        progress.task_id, progress.rollouts = task["task_id"], task["rollouts"]

    def _update(self, progress: Progress) -> None:
        path = f"/tasks/{quote(progress.task_id, safe='')}"
        task = self._api.get(path)
        progress.rollouts = task["rollouts"]
        is_over = task["status"] not in ("queued", "running")
        judged = progress.current_indexes()
        if is_over or count_ended(task) > len(judged):
            for rollout in self._api.get(f"{path}/rollouts")["rollouts"]:
                if rollout["status"] in ENDED and rollout["index"] not in judged:
                    tokens = self._count_tokens(rollout["session_id"])
                    progress.attempts.append(judge(rollout, task, tokens, self._accept))
        if not is_over:
            return
        samples = self._limits.next_round(len(progress.attempts), len(progress.accepted))
        if task["status"] == "cancelled" or samples <= 0:
            progress.kept = self._limits.select(progress.accepted, self._keep)
            progress.done = True
        else:
            self._submit(progress, samples)

    def _count_tokens(self, session_id: str | None) -> int | None:
        """Sampled tokens; None for no session, a deleted one, or one whose records contradict each other."""
        if session_id is None:
            return None
        built = self._api.get_packed(f"/sessions/{quote(session_id, safe='')}/trajectories", absent=(404, 500))
        return None if isinstance(built, int) else int(built["accounting"]["sampled_tokens"])

    def _keep(self, attempt: Attempt) -> bool:
        session_id = attempt.session_id or ""
        if not self._folder.holds(session_id):
            session = self._api.load_session(session_id, "merged")
            if session is None:
                self._screen.say(f"session {session_id} was accepted but has been deleted")
                return False
            self._folder.keep(session, self._spell)
        return True

    def _write(self, complete: bool) -> int:
        """Write every file and report. The number of conversations."""
        conversations, truncated = self._folder.settle(self._progress, complete=complete)
        for line in (*summarize_failures(self._progress), summarize(self._progress)):
            self._screen.say(line)
        self._screen.say(f"{conversations} conversations in {self._folder.path / 'chat.jsonl'}")
        if truncated:
            reasons = ", ".join(f"{count} by {reason}" for reason, count in sorted(truncated.items()))
            self._screen.say(
                f"{truncated.total()} of {conversations} conversations are truncated ({reasons}): see `truncated` in each line"
            )
        return conversations
