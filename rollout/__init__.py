"""Tasks in, finished sessions out.

A task is an instruction to attempt; a rollout is one attempt. Both live in Redis (`proxy.store.tasks`), so any server or node may die.
Servers accept tasks (`proxy.tasks`). A node (`rollout.node`) takes rollouts and runs each through its
stages (`rollout.course`):

    prepare   make a runtime and run the prepare steps in it    (runtimes/)
    ready     wait for a run slot
    run       open a session and run the harness                (harnesses/)
    evaluate  score the result, in a fresh runtime              (evaluators/)
    conclude  close the session with the reward, then the rollout

The proxy is reached over HTTP only (`rollout.sessions`).
"""
