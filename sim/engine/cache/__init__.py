"""Prefix caches: vLLM's blocks and SGLang's tree as pools, and what a scheduler finds in them for waiting sequences.

The room owns which tokens of a prompt need no computing, and when blocks of finished sequences are given back. It must not know
plans or machines. Read the module of `BlockCache` first, then that of `RadixCache`.
"""
