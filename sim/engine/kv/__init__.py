"""KV memory on the device: how many blocks are free, and the structures in which blocks are found again by their content.

The room owns the count of free blocks (`KvPool`), vLLM's blocks in runs with the same holders, SGLang's tree of pages, and contents
as chains of blocks. It must not know time, schedulers or machines. Read the module of `KvPool` first.
"""
