"""Decisions: schedulers, routers, decoding methods, acceptance of drafts, control of fleets, placement.

A policy is a frozen dataclass, or a plain function, with one pure method: it sees a view and answers with a plan. The room
must not know the engine, hardware or files. Read `view` first (all that a scheduler sees and says), then `sarathi`, a short
scheduler; `vllm`, `sglang` and `trtllm` are those of serving engines as released, `wrappers`, `classes` and `adapters`
go around any of them.
"""
