"""Faults in the path of a call: what the harness sees, what is recorded, and who may ask."""

from __future__ import annotations

from tests.mutants.fault import Fault

_FLOW = "tests/proxy/call/test_flow.py -k "
_SECURITY = "tests/proxy/test_security.py -k "
_CONTROL = "tests/proxy/api/test_control_api.py -k "
_EVICTIONS = "tests/proxy/call/test_evictions.py"

FAULTS = (
    # What is sampled
    Fault(
        "The first id of every later chunk of a stream is dropped.",
        "        self.token_ids.extend(piece.token_ids or ())\n",
        "        self.token_ids.extend((piece.token_ids or [])[1 if self.token_ids else 0 :])\n",
        _FLOW + "'streamed_capture'",
    ),
    Fault(
        "The logprobs of a stream's last chunk are lost.",
        "        if piece.logprobs and piece.logprobs.content:\n            self.entries += piece.logprobs.content\n",
        "        if piece.logprobs and piece.logprobs.content and not piece.finish_reason:\n"
        "            self.entries += piece.logprobs.content\n",
        _FLOW + "'streamed_capture'",
    ),
    Fault(
        "On the chat path the ids of a later chunk replace those before it.",
        "            self.token_ids.extend(ids)\n",
        "            self.token_ids = list(ids)\n",
        _FLOW + "'streamed_capture'",
    ),
    Fault(
        "The spans of a reply that goes on across a push all say the version it began with.",
        "        spans.append(Span(version, item.start, item.end))\n",
        "        spans.append(Span(spans[0].version if spans else version, item.start, item.end))\n",
        _FLOW + "'goes_on_across_a_push'",
    ),
    Fault(
        "A call of an adapter says the version that was pushed while it was sampled.",
        "        spans = job.served.read_spans\n",
        "        spans = placed.replica.served.read_spans\n",
        "tests/proxy/test_adapters.py -k 'every_token'",
    ),
    Fault(
        "A token whose weights are not known is trained as one of the newest.",
        "            self._warn_of(label)\n            return None\n",
        "            return self.weight_version\n",
        "tests/proxy/engine/pool/test_pool.py -k 'takes_no_weights_is_version_0'",
    ),
    Fault(
        "The text of a reply is told twice in a stream.",
        "        delta = Delta(self.index, content[sum(map(len, self._sent)) :], ",
        "        delta = Delta(self.index, content, ",
        "tests/proxy/engine/apis/test_certain_text.py",
    ),
    Fault(
        "Ids that merely begin like those before are taken for the same.",
        '    return max(0, right.rfind(b",", 0, shared))\n',
        "    return max(0, shared - 1)\n",
        "tests/proxy/engine/apis/test_id_text.py",
    ),
    # What is asked of the engine
    Fault(
        "What was sampled is encoded anew for the next turn: the model goes on from ids it never said.",
        "    ids, media = np.concatenate((parent.ids, outcome.ids)), media_of(whole)\n",
        "    ids, media = rendering, media_of(whole)\n",
        _FLOW + "'split_the_tokenizer or turn_two'",
    ),
    Fault(
        "The session's sampling overrides are ignored: an agent samples at a temperature of its own.",
        "        {**request.sampling, **overrides},\n",
        "        {**overrides, **request.sampling},\n",
        _FLOW + "'session_overrides'",
    ),
    Fault(
        "A message whose ids name a call is matched with another call that said the same.",
        "    named: Iterable[str] = [call_id for call_id in replayed.minted if call_id in candidates]\n    if not named:\n",
        "    named: Iterable[str] = list(reversed(candidates))\n    if not named:\n",
        "tests/proxy/call/test_session.py -k 'whose_id_the_reply_carries'",
    ),
    Fault(
        "A call at another effort goes on from one that the template renders otherwise.",
        "    return bool(len(now)) and shared_length(then, now) == len(now)\n",
        "    return True\n",
        "tests/proxy/call/test_echo_policies.py -k 'shows'",
    ),
    Fault(
        "An id proves which reply is meant whatever stands before it.",
        "            return self._sent(call) if call is not None and call.fingerprint == before else seen.digests\n",
        "            return self._sent(call) if call is not None else seen.digests\n",
        "tests/proxy/call/test_echo_policies.py",
    ),
    Fault(
        "A message with the ids of two replies stands for one of them.",
        "            if used is None and self._by_id and set(seen.minted) == {call_id}:\n",
        "            if used is None and self._by_id and call_id in seen.minted:\n",
        "tests/proxy/call/test_echo_policies.py",
    ),
    Fault(
        "A history whose reasoning was edited goes on in the row of the original.",
        "        if session.projection(old.call_id, history[old.message_count], request.schemas) is None:\n            return None\n",
        "",
        "tests/proxy/call/test_session.py",
    ),
    Fault(
        "A prompt that shares only a part of its parent's ids is put behind all of them.",
        "    return TreePosition(parent_id, reason, base if shared else None, shared, prompt_ids[shared:], own)\n",
        "    return TreePosition(parent_id, reason, base if shared else None, shared, prompt_ids[shared + 1 :], own)\n",
        _FLOW + "'turn_two or interleaved'",
    ),
    Fault(
        "A continuation that was tokenised anew is told as an extension: no reason says why the row ended.",
        '        reason = branch_reason or "retokenized"\n',
        "        reason = branch_reason\n",
        "tests/proxy/call/test_flow.py tests/proxy/dialects/test_completions.py"
        " -k 'retokenized or such_text_branches or split_the_tokenizer'",
    ),
    # Records
    Fault(
        "The engine samples before the intent is written: a crash loses the call without a trace.",
        "    found, granted = await begin(call, replica, services)\n    try:\n",
        "    found, granted = call.planner.find_parent(call.session, call.request, replica.policy), NO_SHARE\n"
        "    asyncio.ensure_future(begin(call, replica, services))\n    try:\n",
        "tests/proxy/call/test_intent_first.py -k 'on_its_way or cannot_be_written'",
    ),
    Fault(
        "The harness hears the end of a reply before its record is stored.",
        "    return await services.sessions.commit(call.session_id, call.call_id, encoded, size, created_at=created_at)\n",
        "    asyncio.ensure_future(services.sessions.commit(call.session_id, call.call_id, encoded, size))\n"
        "    return call.session.known + len(records)\n",
        _FLOW + "'ends_only_when'",
    ),
    Fault(
        "The choices of a call (n > 1) are all recorded with the tokens of the first.",
        "        completion_ids=pack_ids(sampled.token_ids or ()),\n",
        "        completion_ids=pack_ids(sampled.token_ids or ()) if sibling is None else sibling.node.completion_ids,\n",
        _FLOW + "'every_choice'",
    ),
    Fault(
        "A call that its harness broke off is not recorded, though tokens were sampled.",
        '    if call.scope.cancelled and not any(each.token_ids or each.message.get("content") for each in sampled.choices):\n',
        "    if call.scope.cancelled:\n",
        _FLOW + "'goes_away_ends or aborted_turn'",
    ),
    Fault(
        "Nobody is told that an engine reports no token ids: its replies look like such that sampled nothing.",
        "    if sampled.prompt_ids is None or each.token_ids is None:\n        return NO_TOKEN_IDS\n",
        "",
        "tests/proxy/engine/apis/test_plain_servers.py -k 'quarantined'",
    ),
    Fault(
        "A call is sampled after the ids of one whose ids nobody told: after its own new messages alone.",
        "        return self.full_ids(call_id) if self.calls[call_id].ids_known else None\n",
        "        return self.full_ids(call_id)\n",
        "tests/proxy/call/test_unknown_ids.py",
    ),
    Fault(
        "What a frozen model says is trained.",
        '    return sampled.reasons.get(each.index) or (FROZEN if frozen else "")\n',
        '    return sampled.reasons.get(each.index, "")\n',
        "tests/proxy/engine/pool/test_replicas.py -k 'frozen'",
    ),
    Fault(
        "A reply that never went out is marked as delivered.",
        "            return await self._client.flushed()\n",
        "            return True\n",
        "tests/proxy/call/test_delivered.py -k 'given_up or does_not_say'",
    ),
    Fault(
        "A reply is delivered and nobody notes it, so that it is thrown away as an attempt.",
        "            self._services.metrics.steps.took(exchange.timeline)\n        return delivered\n",
        "            self._services.metrics.steps.took(exchange.timeline)\n        return False\n",
        "tests/proxy/call/test_flow.py -k 'the_harness_gets_the_text'",
    ),
    Fault(
        "A call that the store does not take is answered all the same.",
        '        if outcome == b"frozen":\n            raise Conflict(f"session {session_id} was closed as '
        '{detail[0].decode()} before the call was recorded")\n',
        '        if outcome == b"frozen":\n            return 0\n',
        "tests/proxy/store/test_sessions.py",
    ),
    Fault(
        "A store that is away while a call is committed is passed over, and the reply goes out unrecorded.",
        "    return await services.sessions.commit(call.session_id, call.call_id, encoded, size, created_at=created_at)\n",
        "    with contextlib.suppress(StoreUnavailable):\n"
        "        return await services.sessions.commit(call.session_id, call.call_id, encoded, size, created_at=created_at)\n"
        "    return 0\n",
        "tests/proxy/store/test_faults.py -k 'never_takes'",
    ),
    Fault(
        "A call that an engine broke off is answered as if its reply was whole.",
        "        raise sampled.error\n",
        "        pass\n",
        "tests/proxy/engine/apis/test_ids_api.py -k 'breaks_off'",
    ),
    Fault(
        "Calls that a crash left without a record are missing in the accounting of their session.",
        "    untold = {intent.call_id: DANGLING for intent in intents if intent.call_id not in finished} | damaged\n",
        "    untold = damaged\n",
        "tests/proxy/store/test_faults.py -k 'never_takes'",
    ),
    Fault(
        "Rows of side calls (titles, routing) are given to the trainer with nothing to train.",
        "[row for row in built if row.loss_mask.any() and row.policy in policies]\n",
        "[row for row in built if row.policy in policies]\n",
        "tests/reconstruct/test_roles_and_retries.py -k 'are_not_leased'",
    ),
    Fault(
        "A group is as old as its newest token: rows far off-policy pass for fresh ones.",
        "PolicyRows(len(found), min(span.version for row in found for span in row.weight_versions))",
        "PolicyRows(len(found), max(span.version for row in found for span in row.weight_versions))",
        "tests/proxy/api/test_delivery_service.py -k 'across_versions'",
    ),
    Fault(
        "A session that failed is given to a trainer with the reward it had by then.",
        "state.status in RUN_ENDED and state.reward is not None",
        "state.reward is not None",
        _CONTROL + "'no_usable_member'",
    ),
    # Who may ask
    Fault(
        "The key of one session opens another one.",
        "            if not key_opens(key, info.key_hash):\n",
        "            if not key:\n",
        _SECURITY + "'harness_side_opens and chat'",
    ),
    Fault(
        "A key that names another session than the path opens the one in the path.",
        "    if path_session is not None and path_session != session_id:\n",
        "    if path_session is None:\n",
        "tests/proxy/test_auth.py",
    ),
    Fault(
        "The trainer's token opens what is the admin's.",
        "            if role in roles:\n",
        "            if roles:\n",
        "tests/proxy/test_auth.py",
    ),
    Fault(
        "The harness side's own port serves the control side, too.",
        '        return port != self._settings.control_port and scope["path"] not in _PROBES\n',
        '        return self._routes.is_harness(scope["method"], scope["path"])\n',
        "tests/cli/test_serve.py -k 'its_own_port_alone and one'",
    ),
    Fault(
        "The routes of sessions open to everybody.",
        "def require_admin(request: Request) -> None:\n    _require(request, Role.ADMIN)\n",
        "def require_admin(request: Request) -> None:\n    pass\n",
        _CONTROL + "'its_own_token'",
    ),
    Fault(
        "An open service answers any web page that the machine's browser shows.",
        '        if not is_loopback(named) or port != _address(f"//{host}", scheme)[1]:\n',
        "        if not named:\n",
        "tests/proxy/test_auth.py",
    ),
    Fault(
        "A closed session's key still lists models and counts tokens.",
        '        if state.status != "open":\n            raise Conflict(f"session \'{session_id}\' is {state.status}; '
        'its key opens nothing any more")\n',
        "",
        "tests/proxy/call/test_lifecycle.py -k 'opens_nothing_once'",
    ),
    Fault(
        "A key stands in the log in plain text.",
        '        return _KEY.sub("vb-...", json.dumps(present, default=str))\n',
        "        return json.dumps(present, default=str)\n",
        "tests/proxy/call/test_observed_calls.py -k 'holds_no_key'",
    ),
    Fault(
        "A key stands in the log of a person in plain text.",
        '        return _KEY.sub("vb-...", super().format(record))\n',
        "        return super().format(record)\n",
        "tests/proxy/test_secrets.py -k 'no_secret_is_written'",
    ),
    Fault(
        "A path that is no endpoint is answered like the one it resembles.",
        'return re.compile(f"{_SESSION}{endpoint.versions}{path}/?\\\\Z")\n',
        'return re.compile(f"{_SESSION}{endpoint.versions}{path}")\n',
        "tests/proxy/call/test_routes.py",
    ),
    Fault(
        "Counting tokens samples a reply and records it.",
        '            "count",\n            "POST",\n            "/v1/messages/count_tokens",\n',
        '            "call",\n            "POST",\n            "/v1/messages/count_tokens",\n',
        "tests/proxy/call/test_routes.py",
    ),
    Fault(
        "A body of any size is read into memory.",
        "        if size > most_bytes:\n",
        "        if size < 0:\n",
        _SECURITY + "'beyond_the_limit'",
    ),
    Fault(
        "A session may have more calls under way than it is allowed.",
        "        if self._per_session and self._taken[session_id] >= self._per_session:\n",
        "        if self._per_session and self._taken[session_id] > self._per_session:\n",
        _SECURITY + "'beyond_the_limits_wait'",
    ),
    Fault(
        "An engine is made to fetch whatever address a harness names.",
        '        if isinstance(address, str) and address[:5].lower() != "data:":\n',
        '        if isinstance(address, str) and address[:5].lower() == "file:":\n',
        _SECURITY + "'named_by_address'",
    ),
    # Pushes
    Fault(
        "After a push the service goes on counting a replica's tokens as those of the old weights.",
        "        replica.weight_version = push.version\n        self._keeper.forget_failure(replica)\n",
        "        self._keeper.forget_failure(replica)\n",
        "tests/proxy/engine/pool/test_pool.py -k 'torn'",
    ),
    Fault(
        "A replica with torn weights goes on serving beside those that have the new ones.",
        "            if outcome.error is not None and (applied or isinstance(outcome.error, ReplicaLeft)):\n",
        "            if outcome.error is not None and not applied:\n",
        "tests/proxy/engine/pool/test_pool.py -k 'torn'",
    ),
    Fault(
        "After a push that every replica broke on, engines whose weights are torn are given calls.",
        "(applied or isinstance(outcome.error, ReplicaLeft)):\n",
        "applied:\n",
        "tests/proxy/engine/apis/test_sglang_api.py -k 'rolled_back_leaves'",
    ),
    Fault(
        "Calls are sampled on replicas while weights change under them.",
        "        with self._hold(replicas):\n",
        "        if True:\n",
        _FLOW + "'held_and_sampled'",
    ),
    Fault(
        "Weights that are not greater than the current ones are pushed.",
        "        if push.version <= current.version:\n            raise Conflict(",
        "        if push.version < 0:\n            raise Conflict(",
        "tests/proxy/engine/pool/test_pool.py -k 'version_that_is_taken'",
    ),
    Fault(
        "A frozen model takes new weights.",
        '        if frozen := self._find_frozen(policy):\n            raise Conflict(f"model',
        '        if (frozen := self._find_frozen(policy)) and policy == "?":\n            raise Conflict(f"model',
        "tests/proxy/engine/weights/test_weight_policies.py -k 'frozen'",
    ),
    Fault(
        "A call goes to the engine of another model than the one it asked for.",
        "        return [replica for replica in self._replicas_of(policy) if replica.healthy]\n",
        '        return [replica for replica in self._replicas_of("") if replica.healthy]\n',
        "tests/proxy/engine/pool/test_replicas.py -k 'policy_it_asks_for'",
    ),
    Fault(
        "A call of which a token may have been sampled is sampled again elsewhere, and the first is lost.",
        '        return EngineFailed(f"engine {replica.name} broke off: {type(error).__name__}")\n',
        '        return EngineUnavailable(f"engine {replica.name} broke off: {type(error).__name__}")\n',
        "tests/proxy/engine/pool/test_replicas.py -k 'is_not_tried_again'",
    ),
    Fault(
        "A control token in a tool's output opens a turn where the service renders.",
        "        plain, offered = self._controls.hide(plain), self._controls.hide(list(tools))\n",
        "        offered = list(tools)\n",
        "tests/proxy/engine/apis/test_ids_api.py -k 'read_as_text'",
    ),
    Fault(
        "A result in the prompt names a call by an id that is not there.",
        "    tail = _after_reply(session, history, request.history, len(request.history))\n",
        "    tail = request.messages[found.reply_at + 1 :]\n",
        "tests/proxy/call/test_echo_policies.py -k 'name_the_calls'",
    ),
    Fault(
        "Agents on LiteLLM repeat for minutes a call that is beyond their budget.",
        "    return 401 if isinstance(error, BudgetExhausted) else error.status\n",
        "    return error.status\n",
        "tests/proxy/call/test_budgets.py -k 'not_to_be_repeated'",
    ),
    # What memory keeps
    Fault(
        "A session that was stripped forgets which model its calls asked for, and the next record says that it asked for another.",
        "            if model := read_model(call):\n                self._models[call.call_id] = model\n            self.forest",
        "            self.forest",
        _EVICTIONS,
    ),
    Fault(
        "Text that goes on from what was said is tokenised afresh once memory was short.",
        '    messages = call.messages if call.messages.startswith(_PROMPTS) else b""\n',
        '    messages = b"[]"\n',
        _EVICTIONS,
    ),
    Fault(
        "A response that continues another loses the history before it, once memory was short.",
        '    messages = call.messages if call.messages.startswith(_PROMPTS) else b""\n',
        '    messages = call.messages if call.messages.startswith(_PROMPTS) else b"[]"\n',
        _EVICTIONS,
    ),
    Fault(
        "The reply of a call that was recorded long ago is gone, and another history is taken for its continuation.",
        '    return replace(call, node=replace(call.node, logprobs=_NO_LOGPROBS), messages=messages, preamble=b"")\n',
        '    return replace(call, node=replace(call.node, logprobs=_NO_LOGPROBS), messages=messages, preamble=b"", reply=b"{}")\n',
        _EVICTIONS,
    ),
    Fault(
        "Texts that are in the store alone are never read again: a response cannot be continued.",
        "        start = 0 if session.lacks_texts else session.known\n",
        "        start = session.known\n",
        _EVICTIONS,
    ),
    Fault(
        "Sessions beyond the memory for all are read from the store with every call.",
        "            self._strip(oldest)\n",
        "            self._drop(oldest)\n",
        "tests/proxy/call/test_session.py -k 'left_room'",
    ),
)
