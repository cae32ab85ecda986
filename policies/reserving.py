"""Memory of schedulers that never evict: room for the longest that each admitted request may become."""

from __future__ import annotations

from policies.view import ReplicaView


def longest_tokens(view: ReplicaView, id_: int) -> int:
    """KV tokens of a request whose output is as long as its client allows; no more than the model takes."""
    return min((view.prompt_tokens[id_] or 1) + view.max_tokens[id_], view.max_model_len)


def longest_blocks(view: ReplicaView, id_: int, drafted: int = 0) -> int:
    """KV blocks of a request that has become as long as it may, with slots for *drafted* tokens that its last round verifies; no
    more than there are, so that one which may become longer than all memory waits until it is alone."""
    # The last token is never cached, so that the first drafted one takes no slot of its own.
    return min(view.blocks(longest_tokens(view, id_) + max(drafted - 1, 0)), view.total_blocks)


def unpromised_blocks(view: ReplicaView, drafted: int = 0) -> int:
    """Free KV blocks less those that admitted sequences may still take, in this micro-batch and in others. Their progress does not
    change it, so that an answer that rests on it holds until a sequence joins or ends."""
    if view.promised_blocks >= 0:
        return view.total_blocks - view.promised_blocks - view.leaving_blocks
    running = [seq for seq in view.running[:] if not seq.leaving]
    if view.elsewhere:
        # Blocks of sequences in flight are changing; the most that they may come to hold is not.
        ids = (*(seq.id for seq in running), *view.elsewhere)
        return view.total_blocks - sum(longest_blocks(view, id_, drafted) for id_ in ids)
    return view.free_blocks - sum(max(longest_blocks(view, seq.id, drafted) - seq.blocks, 0) for seq in running)
