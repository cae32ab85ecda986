"""Commands that start real servers: read into scenarios, and written from them.

`scenario_from` takes a command of vLLM, SGLang or TensorRT-LLM, alone or within a shell script, a container or a manifest
(`script`, `documents`); `export` writes commands, or a manifest, for what was simulated. Both name what they cannot carry
over. What is of one engine is in its folder of `engines`; what engines have in common of LoRA adapters and of
encoders is in `adapters` and `encoders`. Read `translate` first, then `engines.vllm.reader` and `export`.
"""

from sim.launch.export import export, recommended
from sim.launch.translate import models_of, scenario_from

__all__ = ["export", "models_of", "recommended", "scenario_from"]
