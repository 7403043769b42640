"""Faults in the pure core: what a row says of tokens that were sampled, which calls hang together, and what is never trained."""

from __future__ import annotations

from tests.mutants.fault import Fault

_FOREST = "tests/reconstruct/test_forest.py"
_BUILDERS = "tests/reconstruct/test_builders.py -k 'not ten_thousand and not thousand_calls and not same_tokens'"
_ACCOUNTING = "tests/reconstruct/test_accounting.py"
_BRIDGE = (
    "tests/reconstruct/test_bridge.py "
    "-k 'turn_end or end_token or newline or doubled or cut or refused or dropped or rewritten or repeated or never_shows'"
)
_MESSAGES = "tests/reconstruct/test_messages.py -k 'not any_order and not under_a_projection'"
_ATTEMPTS = "tests/reconstruct/test_attempts.py"
_CODEC = "tests/reconstruct/test_codec.py -k 'flipped or truncation or schema or written or every_field'"

FAULTS = (
    # Rows
    Fault(
        "The loss mask begins one token late: the first sampled token of every reply is not trained.",
        "        loss_mask[start:end] = 1\n",
        "        loss_mask[start + 1 : end] = 1\n",
        _BUILDERS,
    ),
    Fault(
        "The loss mask goes one token too far: a token of the template is trained as if it was sampled.",
        "        end = start + len(node.completion_ids)\n        places[call_id] = (start, end)\n        loss_mask[start:end] = 1\n",
        "        end = start + len(node.completion_ids)\n        places[call_id] = (start, end)\n        loss_mask[start : end + 1] = 1\n",
        _BUILDERS,
    ),
    Fault(
        "Logprobs of a reply are shifted by one token, so that every importance ratio is that of a neighbour.",
        "        logprobs[start:end] = node.logprobs\n",
        "        logprobs[start:end] = np.roll(node.logprobs, 1)\n",
        _BUILDERS,
    ),
    Fault(
        "Weight versions stand one token off in the row.",
        "Span(span.version, start + span.start, start + span.end) for span in node.spans",
        "Span(span.version, start + span.start + 1, start + span.end + 1) for span in node.spans",
        _BUILDERS,
    ),
    Fault(
        "A call that two branches share is trained twice.",
        "{call_id for call_id in path if call_id not in settled.refused} - owned",
        "{call_id for call_id in path if call_id not in settled.refused}",
        _BUILDERS,
    ),
    Fault(
        "A trainer is shown each rollout as often as it has rows: long agents weigh more than short ones.",
        "row_weight=1 / trained[row.rollout_id, row.policy] if row.loss_mask.any() else 0.0",
        "row_weight=1.0 if row.loss_mask.any() else 0.0",
        "tests/trainer_client/test_credit.py",
    ),
    Fault(
        "A row id changes from one delivery to the next, so that a trainer cannot tell that it had the row before.",
        '    return blake2b("\\0".join((builder, session_id, *path)).encode(), digest_size=12).hexdigest()\n',
        '    return blake2b("\\0".join((builder, session_id, str(id(path)))).encode(), digest_size=12).hexdigest()\n',
        _BUILDERS,
    ),
    Fault(
        "The row of a branch gets the session's reward instead of its own.",
        "    for name in (trajectory_id, last_call_id):\n        if name in context.per_branch:\n",
        "    for name in ():\n        if name in context.per_branch:\n",
        _BUILDERS,
    ),
    # The forest
    Fault(
        "A call whose prompt differs from its parent's ids is merged with it: the row trains tokens after a context they never had.",
        "            if not np.array_equal(_own_ids(one, start, length), _own_ids(other, start, length)):\n                return False\n",
        "            if not np.array_equal(_own_ids(one, start, length), _own_ids(other, start, length)):\n                return True\n",
        _FOREST,
    ),
    Fault(
        "Rows of two models are merged into one, whose versions are counted on one line.",
        "        if self.calls[parent_id].policy != call.policy:\n            return False\n",
        "",
        "tests/proxy/test_policy_rows.py -k 'never_runs_through'",
    ),
    Fault(
        "A prompt that leans on a call ends one id early.",
        "                parts.append(node.completion_ids[: own - len(node.delta_ids)])\n",
        "                parts.append(node.completion_ids[: own - len(node.delta_ids) - 1])\n",
        _FOREST,
    ),
    # What is trained
    Fault(
        "A call whose record breaks a rule (a missing logprob, spans with gaps) is trained all the same.",
        '    except RecordError as error:\n        return error.reason\n    return ""\n',
        '    except RecordError:\n        return ""\n    return ""\n',
        _ACCOUNTING,
    ),
    Fault(
        "A reply that no harness got is trained.",
        "            or (call.call_id in attempts and NOT_DELIVERED)\n",
        "",
        _ATTEMPTS,
    ),
    Fault(
        "A call that was sampled after ids that are none is trained.",
        '            or (IdOutOfRange.reason if call.call_id in unsound else "")\n',
        "",
        _ACCOUNTING,
    ),
    Fault(
        "A missing logprob passes for a number.",
        "        if not finite.all():\n",
        "        if not finite.any():\n",
        _ACCOUNTING,
    ),
    Fault(
        "Fewer logprobs than sampled ids pass: from the gap on each is another token's.",
        "        if len(self.logprobs) != sampled:\n",
        "        if len(self.logprobs) > sampled:\n",
        _ACCOUNTING,
    ),
    Fault(
        "Logits are trained as if they were logprobs.",
        '    if LOGITS in modes:\n        return "logits_for_logprobs"\n',
        "",
        "tests/reconstruct/test_details.py -k 'logits'",
    ),
    Fault(
        "The accounting loses calls whose parent's record is missing.",
        "    calls = [*settled.forest.calls.values(), *settled.stray]\n",
        "    calls = [*settled.forest.calls.values()]\n",
        _ACCOUNTING,
    ),
    Fault(
        "The accounting loses calls that a crash left without a record.",
        "    quarantined += [Quarantined(call_id, 0, reason) for call_id, reason in (untold or {}).items()]\n",
        "",
        _ACCOUNTING,
    ),
    Fault(
        "Numbers that do not add up are handed out as an accounting.",
        "    if accounting.sampled_tokens != accounting.exported_tokens + quarantined:\n",
        "    if accounting.sampled_tokens < accounting.exported_tokens + quarantined:\n",
        _ACCOUNTING,
    ),
    Fault(
        "A row whose tokens are trained twice passes the last check.",
        "        _refuse_first(counts > 1,",
        "        _refuse_first(counts > 2,",
        _ACCOUNTING,
    ),
    Fault(
        "A row with other logprobs than those sampled passes the last check.",
        "    _refuse_first(np.where(mask, logprobs, 0) != row.logprobs,",
        "    _refuse_first(np.where(mask, logprobs, 0) != np.where(mask, logprobs, 0),",
        _ACCOUNTING,
    ),
    # Retries
    Fault(
        "A session is incomplete for want of a reply that no harness got.",
        "(*_LEFT_OUT, REPLAYED, NOT_DELIVERED)",
        "(*_LEFT_OUT, REPLAYED)",
        _ATTEMPTS,
    ),
    Fault(
        "Samples of one prompt that a process had under way as it died are thrown away but for the last.",
        "        and last_asked[_history_of(call)] < call.started_at + call.engine_seconds + call.own_seconds\n",
        "        and last_asked[_history_of(call)] <= call.started_at\n",
        _ATTEMPTS,
    ),
    Fault(
        "A reply that the harness went on from is thrown away as an attempt.",
        "if call.call_id in delivered or forest.children(call.call_id)}\n",
        "if call.call_id in delivered}\n",
        _ATTEMPTS,
    ),
    # The bridge
    Fault(
        "The newline that the template puts after a turn is dropped from the bridge.",
        "        return Bridge(whole[begin + stop + 1 :])\n",
        "        return Bridge(whole[begin + stop + 2 :])\n",
        _BRIDGE,
    ),
    Fault(
        "A reply that was cut goes on without the template's end of its turn.",
        "    end = missing[: len(missing) - len(close) + length]\n",
        "    end = missing[:0]\n",
        _BRIDGE,
    ),
    Fault(
        "A stop token that opens the next turn stands there twice.",
        "        return Bridge(whole[begin + stop + 1 :])\n",
        "        return Bridge(whole[begin + stop :])\n",
        _BRIDGE,
    ),
    Fault(
        "A history that the template shows otherwise than before is bridged as if nothing had changed.",
        "    if hidden or not _starts_with(whole, before):\n",
        "    if hidden:\n",
        _BRIDGE,
    ),
    Fault(
        "Thinking that the template no longer shows is trained as context, though nobody asked for that.",
        '    if hidden and not retain_thinking:\n        return Unproven("thinking_dropped")\n    if hidden or',
        "    retain_thinking = True\n    if hidden or",
        _BRIDGE,
    ),
    Fault(
        "Text that the template moves behind a tool's result takes the result out of the context.",
        "    if begin > end or not _starts_with(asked, before):\n",
        "    if not _starts_with(asked, before):\n",
        _BRIDGE,
    ),
    Fault(
        "What another model sampled, with another tokenizer, is gone on from.",
        "    if begin > end or not _starts_with(asked, before):\n",
        "    if begin > end:\n",
        "tests/reconstruct/test_prompt.py -k 'another_model'",
    ),
    Fault(
        "What another model sampled is gone on from once its rendering is forgotten.",
        "    if by_substitution and parent.asked is None and not (yield from _begins_alike(parent, parent.ids)):\n",
        "    if False:\n",
        "tests/reconstruct/test_prompt.py -k 'another_model'",
    ),
    Fault(
        "A turn that the model ended with another token than the template's goes on without the template's end of it.",
        "        return Bridge(whole[begin + start :], adds_end=True)\n",
        "        return Bridge(whole[begin + start + length :], adds_end=True)\n",
        _BRIDGE,
    ),
    # Messages
    Fault(
        "A tool call whose arguments come back in another order is taken for an edit, and the conversation branches at every turn.",
        "        parsed = json.loads(arguments) if arguments.strip() else {}\n",
        "        return arguments\n",
        _MESSAGES,
    ),
    Fault(
        "A header line that changes with every request (a date, a token count) breaks the conversation at every turn.",
        '    return "".join(line for line in text.splitlines(keepends=True) if not volatile.search(line.rstrip("\\r\\n")))\n',
        "    return text\n",
        _MESSAGES,
    ),
    Fault(
        "The ids that the service minted into tool calls are not read back: calls that look alike are taken for each other.",
        "    return [place[0] for place in places if place is not None]\n",
        "    return []\n",
        _MESSAGES,
    ),
    Fault(
        "An edited reply passes for the one that was sampled.",
        "            if normalize(content.strip()) != normalize(sent_content.strip()):\n                return None\n",
        "",
        _MESSAGES,
    ),
    # Records
    Fault(
        "A record with a flipped bit is read as if nothing had happened.",
        "    if _crc(packed) != data[-_CRC_BYTES:]:\n",
        "    if len(data) < _CRC_BYTES:\n",
        _CODEC,
    ),
    Fault(
        "A record of another build is read as one of this build.",
        "    if type(version) is not int or version != SCHEMA_VERSION:\n",
        "    if type(version) is not int:\n",
        _CODEC,
    ),
)
