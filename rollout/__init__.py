"""Tasks in, finished sessions out.

A task is an instruction to attempt; a rollout is one attempt. Tasks and rollouts live in Redis (`rollout.store`), so any server or
node may die. A server takes tasks (`rollout.api`, mounted into the served app); a node (`rollout.node`) takes rollouts one by one and
brings each through its stages:

    prepare   a runtime is made and the prepare steps run in it         (runtimes/)
    ready     it waits, holding no run slot
    run       a session is opened and the harness works in the runtime  (harnesses/)
    evaluate  the result gets its reward, in a fresh runtime            (evaluators/)
    conclude  the session is closed with it, then the rollout

What is known of the proxy is its HTTP contract (`rollout.sessions`); nothing of it is imported.
"""
