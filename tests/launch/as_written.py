"""Sixty ways in which people write down how their server is started: commands, containers, manifests and values of charts."""

# ruff: noqa: E501 (lines as they are written elsewhere)
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Written:
    """A text, and what has to become of it: settings by dotted name, and words of what is said beside them or of the refusal."""

    text: str
    settings: dict[str, Any] = field(default_factory=dict)
    says: tuple[str, ...] = ()
    refused: str | None = None
    """The one sentence that refuses it and says what to do."""


def _k8s(kind: str, container: str, *, replicas: int = 1, extra: str = "") -> str:
    return f"""apiVersion: apps/v1
kind: {kind}
metadata:
  name: server
spec:
  replicas: {replicas}
  selector:
    matchLabels: {{app: server}}
  template:
    metadata:
      labels: {{app: server}}
    spec:
{extra}      containers:
{container}"""


WRITTEN: dict[str, Written] = {
    # Plain commands of vLLM.
    "vllm-plain": Written(
        text="vllm serve Qwen/Qwen3-8B",
        settings={"model": "Qwen/Qwen3-8B", "serving_stack": "vllm", "parallel.tensor": 1},
    ),
    "vllm-many-lines": Written(
        text="""vllm serve meta-llama/Llama-3.1-70B-Instruct \\
  --tensor-parallel-size 4 \\
  --max-model-len 32768 \\
  --gpu-memory-utilization 0.92 \\
  --enable-chunked-prefill \\
  --max-num-batched-tokens=8192 \\
  --served-model-name llama
""",
        settings={
            "parallel.tensor": 4,
            "memory.max_model_len": 32768,
            "memory.gpu_memory_utilization": 0.92,
            "scheduler.max_num_batched_tokens": 8192,
        },
        says=("--served-model-name llama",),
    ),
    "vllm-variables-in-front": Written(
        text="CUDA_VISIBLE_DEVICES=0,1 HF_TOKEN=$HF_TOKEN VLLM_USE_V1=1 vllm serve Qwen/Qwen3-32B -tp 2",
        settings={"parallel.tensor": 2},
        says=("VLLM_USE_V1", "CUDA_VISIBLE_DEVICES"),
    ),
    "vllm-export-lines": Written(
        text="export HF_HOME=/data/hf\nexport VLLM_ATTENTION_BACKEND=FLASHINFER\nvllm serve Qwen/Qwen3-32B -tp 2\n",
        settings={"model": "Qwen/Qwen3-32B", "parallel.tensor": 2},
        says=("VLLM_ATTENTION_BACKEND",),
    ),
    "vllm-nohup": Written(
        text="nohup vllm serve Qwen/Qwen3-8B --port 8001 --host 0.0.0.0 > server.log 2>&1 &",
        settings={"model": "Qwen/Qwen3-8B"},
        says=("server.log",),
    ),
    "vllm-module": Written(
        text="python3 -m vllm.entrypoints.openai.api_server --model mistralai/Mixtral-8x7B-Instruct-v0.1 "
        "--tensor-parallel-size=2 --dtype bfloat16 --disable-log-requests",
        settings={"parallel.tensor": 2, "precision": "bf16"},
        says=("--disable-log-requests",),
    ),
    "vllm-removed-swap-space": Written(
        text="vllm serve meta-llama/Meta-Llama-3-8B-Instruct --swap-space 16 --use-v2-block-manager --num-scheduler-steps 8",
        settings={"model": "meta-llama/Meta-Llama-3-8B-Instruct"},
        says=("--swap-space", "--use-v2-block-manager", "--num-scheduler-steps", "removed"),
    ),
    "vllm-removed-seq-len-to-capture": Written(
        text="vllm serve Qwen/Qwen3-32B -tp 4 --max-seq-len-to-capture 8192 --disable-log-stats --max-parallel-loading-workers 2",
        settings={"parallel.tensor": 4},
        says=("--max-seq-len-to-capture", "removed"),
    ),
    "vllm-old-speculation": Written(
        text="python -m vllm.entrypoints.openai.api_server --model meta-llama/Meta-Llama-3-70B-Instruct -tp 4 "
        "--speculative-model meta-llama/Llama-3.2-1B --num-speculative-tokens 5",
        refused="decoding.acceptance",
    ),
    "vllm-unknown-option": Written(
        text="vllm serve Qwen/Qwen3-32B --tensor-parallel-sizee 4 --turbo-mode",
        settings={"model": "Qwen/Qwen3-32B"},
        says=("--tensor-parallel-sizee", "--tensor-parallel-size", "--turbo-mode"),
    ),
    "vllm-json-compilation": Written(
        text='vllm serve Qwen/Qwen3-32B --compilation-config \'{"level": 3, "cudagraph_capture_sizes": [1, 2, 4, 8]}\'',
        settings={"model": "Qwen/Qwen3-32B"},
        says=("--compilation-config",),
    ),
    "vllm-eagle3": Written(
        text="vllm serve meta-llama/Llama-3.1-8B-Instruct --speculative-config "
        '\'{"model": "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "method": "eagle3", "num_speculative_tokens": 3, '
        '"draft_tensor_parallel_size": 1}\'',
        settings={"decoding.method": "eagle", "decoding.num_speculative_tokens": 3},
        says=("assumed",),
    ),
    "vllm-mtp": Written(
        text="vllm serve deepseek-ai/DeepSeek-R1 -tp 8 --enable-expert-parallel --speculative-config "
        '\'{"method": "deepseek_mtp", "num_speculative_tokens": 1}\'',
        settings={"decoding.method": "mtp", "decoding.num_speculative_tokens": 1, "parallel.expert": 8},
        says=("assumed",),
    ),
    "vllm-eagle-70b": Written(
        text="vllm serve meta-llama/Llama-3.3-70B-Instruct -tp 4 --speculative_config "
        '\'{"method":"eagle","model":"yuhuili/EAGLE-LLaMA3-Instruct-70B","num_speculative_tokens":5}\'',
        settings={"decoding.method": "eagle", "decoding.num_speculative_tokens": 5},
        says=("assumed",),
    ),
    "vllm-ngram": Written(
        text='vllm serve Qwen/Qwen3-8B --speculative-config \'{"method": "ngram", "num_speculative_tokens": 4, '
        '"prompt_lookup_max": 4}\'',
        refused="decoding.acceptance",
    ),
    "vllm-draft-model": Written(
        text='vllm serve Qwen/Qwen3-32B -tp 4 --speculative-config \'{"model": "Qwen/Qwen3-0.6B", "num_speculative_tokens": 4}\'',
        refused="decoding.acceptance",
    ),
    "vllm-lora": Written(
        text="vllm serve meta-llama/Llama-3.1-8B-Instruct --enable-lora --max-loras 4 --max-lora-rank 64 "
        "--lora-modules sql=/adapters/sql chat=/adapters/chat",
        settings={"model": "meta-llama/Llama-3.1-8B-Instruct"},
        says=("adapters.count",),
    ),
    "vllm-multimodal": Written(
        text='vllm serve google/gemma-3-27b-it -tp 2 --limit-mm-per-prompt \'{"image": 4, "video": 0}\' '
        "--mm-processor-kwargs '{\"do_pan_and_scan\": true}' --allowed-local-media-path /data",
        settings={"parallel.tensor": 2},
        says=("--limit-mm-per-prompt", "--allowed-local-media-path"),
    ),
    "vllm-tools": Written(
        text="vllm serve Qwen/Qwen3-32B --enable-auto-tool-choice --tool-call-parser hermes --reasoning-parser qwen3 "
        "--chat-template ./t.jinja --api-key sk-123 --trust-remote-code",
        settings={"model": "Qwen/Qwen3-32B"},
        says=("--tool-call-parser hermes",),
    ),
    "vllm-pipeline-ray": Written(
        text="vllm serve meta-llama/Llama-3.1-405B-Instruct --tensor-parallel-size 8 --pipeline-parallel-size 2 "
        "--distributed-executor-backend ray --quantization fp8",
        settings={"parallel.tensor": 8, "parallel.pipeline": 2, "precision": "fp8"},
    ),
    "vllm-data-parallel-moe": Written(
        text="vllm serve deepseek-ai/DeepSeek-V3 --data-parallel-size 16 --data-parallel-size-local 8 "
        "--data-parallel-address 10.0.0.1 --data-parallel-rpc-port 13345 --enable-expert-parallel "
        "--all2all-backend deepep_low_latency --api-server-count=4",
        settings={"parallel.data": 16, "parallel.expert": 16, "experts.exchange": "deepep_low_latency"},
    ),
    "vllm-nixl-pair": Written(
        text="vllm serve Qwen/Qwen3-32B -tp 2 --port 8100 --kv-transfer-config "
        '\'{"kv_connector":"NixlConnector","kv_role":"kv_producer"}\'\n'
        "vllm serve Qwen/Qwen3-32B -tp 2 --port 8200 --kv-transfer-config "
        '\'{"kv_connector":"NixlConnector","kv_role":"kv_consumer"}\'',
        settings={"pools.prefill.parallel.tensor": 2, "pools.decode.role": "decode"},
    ),
    "vllm-gpt-oss": Written(
        text="vllm serve openai/gpt-oss-120b --tensor-parallel-size 2 --async-scheduling --max-num-seqs 256",
        settings={"scheduler.max_num_seqs": 256, "scheduler.async_scheduling": True},
    ),
    "vllm-unknown-model": Written(
        text="vllm serve my-org/internal-chat-v7 -tp 2",
        refused="--set model=",
    ),
    "vllm-bench-serve": Written(
        text="vllm bench serve --model Qwen/Qwen3-8B --dataset-name random --num-prompts 100",
        refused="starts no server",
    ),
    "vllm-bash-c": Written(
        text="bash -c 'vllm serve Qwen/Qwen3-8B --max-num-seqs 64'",
        settings={"scheduler.max_num_seqs": 64},
    ),
    "vllm-uv-run": Written(
        text="uv run --with vllm vllm serve Qwen/Qwen3-8B --max-num-seqs 64 --no-enable-prefix-caching",
        settings={"scheduler.max_num_seqs": 64, "memory.prefix_caching": False},
    ),
    # SGLang.
    "sglang-plain": Written(
        text="python3 -m sglang.launch_server --model-path meta-llama/Llama-3.1-8B-Instruct --host 0.0.0.0 --port 30000",
        settings={"model": "meta-llama/Llama-3.1-8B-Instruct", "serving_stack": "sglang"},
    ),
    "sglang-deepseek": Written(
        text="python -m sglang.launch_server --model deepseek-ai/DeepSeek-V3 --tp 16 --dist-init-addr 10.0.0.1:20000 "
        "--nnodes 2 --node-rank 0 --trust-remote-code --enable-dp-attention --dp 16 --ep 16 "
        "--moe-a2a-backend deepep --chunked-prefill-size 16384 --context-length 65536",
        settings={"parallel.data": 16, "parallel.expert": 16, "memory.max_model_len": 65536},
        says=("--moe-a2a-backend deepep",),
    ),
    "sglang-eagle": Written(
        text="python3 -m sglang.launch_server --model deepseek-ai/DeepSeek-R1 --speculative-algorithm EAGLE "
        "--speculative-num-steps 1 --speculative-eagle-topk 1 --speculative-num-draft-tokens 2 --tp 8 --trust-remote-code",
        settings={"decoding.method": "mtp", "decoding.num_speculative_tokens": 1},
        says=("assumed",),
    ),
    "sglang-eagle3": Written(
        text="python3 -m sglang.launch_server --model meta-llama/Llama-3.1-8B-Instruct --speculative-algorithm EAGLE3 "
        "--speculative-draft-model-path jamesliu1/sglang-EAGLE3-Llama-3.1-Instruct-8B --speculative-num-steps 5 "
        "--speculative-eagle-topk 8 --speculative-num-draft-tokens 32 --mem-fraction 0.6 --cuda-graph-max-bs 2 --dtype float16",
        settings={"decoding.method": "eagle", "memory.mem_fraction_static": 0.6, "precision": "fp16"},
        says=("assumed", "--speculative-eagle-topk 8"),
    ),
    "sglang-removed": Written(
        text="python -m sglang.launch_server --model-path Qwen/Qwen3-32B --tp 2 --enable-p2p-check --disable-flashinfer "
        "--enable-ep-moe",
        settings={"parallel.tensor": 2},
        says=("--disable-flashinfer", "--enable-ep-moe"),
    ),
    "sglang-disaggregated": Written(
        text="python -m sglang.launch_server --model-path Qwen/Qwen3-32B --disaggregation-mode prefill --tp 2 "
        "--disaggregation-ib-device mlx5_0 --port 30000\n"
        "python -m sglang.launch_server --model-path Qwen/Qwen3-32B --disaggregation-mode decode --tp 4 --port 30001\n"
        "python -m sglang_router.launch_router --pd-disaggregation --prefill http://127.0.0.1:30000 "
        "--decode http://127.0.0.1:30001",
        settings={"pools.prefill.parallel.tensor": 2, "pools.decode.parallel.tensor": 4},
        says=("sglang_router",),
    ),
    # TensorRT-LLM.
    "trtllm-plain": Written(
        text="trtllm-serve meta-llama/Llama-3.1-8B-Instruct --tp_size 2 --max_batch_size 128 --max_num_tokens 4096 "
        "--max_seq_len 8192 --kv_cache_free_gpu_memory_fraction 0.9",
        settings={
            "parallel.tensor": 2,
            "scheduler.max_batch_size": 128,
            "memory.free_gpu_memory_fraction": 0.9,
            "memory.max_model_len": 8192,
        },
    ),
    "trtllm-serve-word": Written(
        text="trtllm-serve serve nvidia/Llama-3.1-405B-Instruct-FP8 --backend pytorch --tp_size 8 --ep_size 1 "
        "--host 0.0.0.0 --port 8000",
        settings={"parallel.tensor": 8},
    ),
    "trtllm-mpirun": Written(
        text="mpirun -n 1 --oversubscribe --allow-run-as-root trtllm-serve deepseek-ai/DeepSeek-R1 --tp_size 8 --ep_size 8 "
        "--max_batch_size 161 --log_level info --trust_remote_code",
        settings={"parallel.tensor": 8, "parallel.expert": 8, "scheduler.max_batch_size": 161},
        says=("mpirun",),
    ),
    "trtllm-missing-file": Written(
        text="trtllm-serve Qwen/Qwen3-32B --extra_llm_api_options /workspace/extra-llm-api-config.yml",
        refused="cannot be read",
    ),
    # Containers.
    "docker-vllm": Written(
        text="docker run --runtime nvidia --gpus all -v ~/.cache/huggingface:/root/.cache/huggingface "
        '--env "HUGGING_FACE_HUB_TOKEN=<secret>" -p 8000:8000 --ipc=host vllm/vllm-openai:latest '
        "--model Qwen/Qwen3-32B --tensor-parallel-size 2",
        settings={"model": "Qwen/Qwen3-32B", "parallel.tensor": 2},
    ),
    "docker-vllm-old": Written(
        text="docker run -d --gpus '\"device=0,1\"' --shm-size 16g vllm/vllm-openai:v0.6.3 --model meta-llama/Llama-3.1-70B-Instruct "
        "-tp 2 --swap-space 4 --max-model-len 16384",
        settings={"parallel.tensor": 2, "memory.max_model_len": 16384},
        says=("vllm 0.6.3", "--swap-space"),
    ),
    "docker-positional-model": Written(
        text="docker run --gpus all vllm/vllm-openai:v0.11.0 Qwen/Qwen3-8B --max-num-seqs 32",
        settings={"model": "Qwen/Qwen3-8B", "scheduler.max_num_seqs": 32},
        says=("vllm 0.11.0",),
    ),
    "docker-entrypoint-replaced": Written(
        text="docker run --rm --gpus all --entrypoint /bin/bash vllm/vllm-openai:v0.10.2 "
        "-c 'pip install hf_transfer && vllm serve Qwen/Qwen3-32B -tp 4'",
        settings={"model": "Qwen/Qwen3-32B", "parallel.tensor": 4},
        says=("pip install",),
    ),
    "docker-entrypoint-python": Written(
        text="docker run --gpus all --entrypoint python3 vllm/vllm-openai:v0.10.2 -m vllm.entrypoints.openai.api_server "
        "--model Qwen/Qwen3-32B -tp 4",
        settings={"model": "Qwen/Qwen3-32B", "parallel.tensor": 4},
    ),
    "docker-sglang": Written(
        text="docker run --gpus all --shm-size 32g -p 30000:30000 -v ~/.cache/huggingface:/root/.cache/huggingface "
        "--env HF_TOKEN=x --ipc=host lmsysorg/sglang:latest python3 -m sglang.launch_server "
        "--model-path meta-llama/Llama-3.1-8B-Instruct --host 0.0.0.0 --port 30000",
        settings={"serving_stack": "sglang", "model": "meta-llama/Llama-3.1-8B-Instruct"},
    ),
    "podman-trtllm": Written(
        text="podman run --rm -it --device nvidia.com/gpu=all nvcr.io/nvidia/tensorrt-llm/release:1.2.0 "
        "trtllm-serve Qwen/Qwen3-32B --tp_size 4",
        settings={"serving_stack": "trtllm", "parallel.tensor": 4},
    ),
    "docker-nginx": Written(
        text="docker run -p 80:80 nginx:latest",
        refused="starts no server",
    ),
    # Compose files.
    "compose-vllm": Written(
        text="""services:
  vllm:
    image: vllm/vllm-openai:v0.11.0
    command: --model Qwen/Qwen3-32B --tensor-parallel-size 2 --max-model-len 16k
    environment:
      - HF_TOKEN=${HF_TOKEN}
    ports: ["8000:8000"]
    deploy:
      resources:
        reservations:
          devices:
            - {driver: nvidia, count: 2, capabilities: [gpu]}
  redis:
    image: redis:7
""",
        settings={"model": "Qwen/Qwen3-32B", "parallel.tensor": 2, "memory.max_model_len": 16000},
        says=("redis",),
    ),
    "compose-sglang": Written(
        text="""version: "3.8"
services:
  sglang:
    image: lmsysorg/sglang:latest
    entrypoint: python3 -m sglang.launch_server
    command:
      - --model-path
      - meta-llama/Llama-3.1-8B-Instruct
      - --tp
      - "2"
    environment:
      HF_TOKEN: x
""",
        settings={"serving_stack": "sglang", "parallel.tensor": 2},
    ),
    # Kubernetes.
    "k8s-args": Written(
        text=_k8s(
            "Deployment",
            """        - name: vllm
          image: vllm/vllm-openai:v0.10.0
          args: ["--model", "Qwen/Qwen3-32B", "--tensor-parallel-size", "2", "--enable-prefix-caching"]
          env:
            - {name: VLLM_LOGGING_LEVEL, value: DEBUG}
          resources:
            limits: {nvidia.com/gpu: "2"}
""",
            replicas=3,
            extra="      nodeSelector: {nvidia.com/gpu.product: NVIDIA-H100-80GB-HBM3}\n",
        ),
        settings={"hardware": "h100-sxm", "replicas": 3, "parallel.tensor": 2, "memory.prefix_caching": True},
        says=("VLLM_LOGGING_LEVEL",),
    ),
    "k8s-shell": Written(
        text=_k8s(
            "StatefulSet",
            """        - name: vllm
          image: vllm/vllm-openai:latest
          command: ["/bin/sh", "-c"]
          args:
            - "vllm serve mistralai/Mistral-7B-Instruct-v0.3 --trust-remote-code --enable-chunked-prefill --max_num_batched_tokens 1024"
""",
        ),
        settings={"scheduler.max_num_batched_tokens": 1024, "scheduler.enable_chunked_prefill": True},
    ),
    "k8s-env-in-args": Written(
        text=_k8s(
            "Deployment",
            """        - name: server
          image: lmsysorg/sglang:v0.5.3
          command: ["python3", "-m", "sglang.launch_server"]
          args: ["--model-path", "$(MODEL_ID)", "--tp", "$(TP)"]
          env:
            - {name: MODEL_ID, value: Qwen/Qwen3-32B}
            - {name: TP, value: "4"}
""",
        ),
        settings={"model": "Qwen/Qwen3-32B", "parallel.tensor": 4},
    ),
    "k8s-pair": Written(
        text=_k8s(
            "Deployment",
            """        - name: prefill
          image: vllm/vllm-openai:v0.11.0
          args: [--model, Qwen/Qwen3-32B, -tp, "2", --kv-transfer-config,
                 '{"kv_connector": "NixlConnector", "kv_role": "kv_producer"}']
""",
            replicas=2,
        )
        + "---\n"
        + _k8s(
            "Deployment",
            """        - name: decode
          image: vllm/vllm-openai:v0.11.0
          args: [--model, Qwen/Qwen3-32B, -tp, "4", --kv-transfer-config,
                 '{"kv_connector": "NixlConnector", "kv_role": "kv_consumer"}']
""",
        )
        + "---\napiVersion: v1\nkind: Service\nmetadata: {name: server}\nspec: {ports: [{port: 8000}]}\n",
        settings={"pools.prefill.replicas": 2, "pools.decode.parallel.tensor": 4},
    ),
    "lws": Written(
        text="""apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
metadata: {name: vllm}
spec:
  replicas: 2
  leaderWorkerTemplate:
    size: 2
    leaderTemplate:
      spec:
        containers:
          - name: leader
            image: vllm/vllm-openai:latest
            command: [sh, -c, "bash /vllm-workspace/examples/online_serving/multi-node-serving.sh leader --ray_cluster_size=2; python3 -m vllm.entrypoints.openai.api_server --port 8080 --model meta-llama/Llama-3.1-405B-Instruct --tensor-parallel-size 8 --pipeline_parallel_size 2"]
    workerTemplate:
      spec:
        containers:
          - name: worker
            image: vllm/vllm-openai:latest
            command: [sh, -c, "bash /vllm-workspace/examples/online_serving/multi-node-serving.sh worker --ray_address=$(LWS_LEADER_ADDRESS)"]
""",
        settings={"parallel.tensor": 8, "parallel.pipeline": 2, "replicas": 2},
    ),
    # Values of charts.
    "production-stack": Written(
        text="""servingEngineSpec:
  runtimeClassName: ""
  modelSpec:
    - name: llama3
      repository: vllm/vllm-openai
      tag: latest
      modelURL: meta-llama/Llama-3.1-8B-Instruct
      replicaCount: 2
      requestCPU: 10
      requestMemory: 16Gi
      requestGPU: 1
      pvcStorage: 50Gi
      vllmConfig:
        enableChunkedPrefill: true
        enablePrefixCaching: false
        maxModelLen: 16384
        dtype: bfloat16
        tensorParallelSize: 1
        extraArgs: ["--disable-log-requests", "--gpu-memory-utilization", "0.8"]
      hf_token: x
routerSpec:
  routingLogic: roundrobin
""",
        settings={
            "replicas": 2,
            "memory.max_model_len": 16384,
            "memory.prefix_caching": False,
            "memory.gpu_memory_utilization": 0.8,
            "router.policy": "round_robin",
        },
    ),
    "llm-d-modelservice": Written(
        text="""modelArtifacts:
  uri: hf://Qwen/Qwen3-32B
  size: 80Gi
routing:
  servicePort: 8000
decode:
  create: true
  replicas: 2
  parallelism: {tensor: 4}
  containers:
    - name: vllm
      image: ghcr.io/llm-d/llm-d:v0.2.0
      modelCommand: vllmServe
      args: ["--block-size", "128", "--kv-transfer-config", '{"kv_connector":"NixlConnector","kv_role":"kv_both"}', "--disable-uvicorn-access-log"]
      resources: {limits: {nvidia.com/gpu: "4"}}
prefill:
  create: true
  replicas: 4
  parallelism: {tensor: 1}
  containers:
    - name: vllm
      image: ghcr.io/llm-d/llm-d:v0.2.0
      modelCommand: vllmServe
      args: ["--block-size", "128", "--kv-transfer-config", '{"kv_connector":"NixlConnector","kv_role":"kv_both"}']
""",
        settings={
            "pools.prefill.replicas": 4,
            "pools.decode.parallel.tensor": 4,
            "pools.decode.memory.block_tokens": 128,
        },
    ),
    "dynamo-v1alpha1": Written(
        text="""apiVersion: nvidia.com/v1alpha1
kind: DynamoGraphDeployment
metadata: {name: vllm-disagg}
spec:
  services:
    Frontend:
      componentType: frontend
      replicas: 1
      extraPodSpec: {mainContainer: {image: nvcr.io/nvidia/ai-dynamo/vllm-runtime:0.6.0}}
    VllmDecodeWorker:
      componentType: worker
      subComponentType: decode
      replicas: 2
      resources: {limits: {gpu: "2"}}
      extraPodSpec:
        mainContainer:
          image: nvcr.io/nvidia/ai-dynamo/vllm-runtime:0.6.0
          command: [python3, -m, dynamo.vllm]
          args: [--model, Qwen/Qwen3-32B, --tensor-parallel-size, "2"]
    VllmPrefillWorker:
      componentType: worker
      subComponentType: prefill
      replicas: 1
      extraPodSpec:
        mainContainer:
          image: nvcr.io/nvidia/ai-dynamo/vllm-runtime:0.6.0
          command: [python3, -m, dynamo.vllm]
          args: [--model, Qwen/Qwen3-32B, --is-prefill-worker]
""",
        settings={"pools.decode.replicas": 2, "pools.decode.parallel.tensor": 2, "pools.prefill.role": "prefill"},
    ),
    "dynamo-command": Written(
        text="python -m dynamo.sglang --model-path Qwen/Qwen3-8B --page-size 16 --tp 1 --trust-remote-code",
        settings={"serving_stack": "sglang", "memory.block_tokens": 16},
    ),
    # KServe and Ray Serve.
    "kserve-huggingface": Written(
        text="""apiVersion: serving.kserve.io/v1beta1
kind: InferenceService
metadata: {name: huggingface-llama3}
spec:
  predictor:
    minReplicas: 1
    maxReplicas: 4
    model:
      modelFormat: {name: huggingface}
      args:
        - --model_name=llama3
        - --model_id=meta-llama/Meta-Llama-3-8B-Instruct
        - --dtype=float16
        - --backend=vllm
        - --max-model-len=8192
      resources: {limits: {nvidia.com/gpu: "1"}}
""",
        settings={"model": "meta-llama/Meta-Llama-3-8B-Instruct", "precision": "fp16", "memory.max_model_len": 8192},
        says=("--model_name", "llama3"),
    ),
    "kserve-llm": Written(
        text="""apiVersion: serving.kserve.io/v1alpha1
kind: LLMInferenceService
metadata: {name: qwen}
spec:
  model: {uri: hf://Qwen/Qwen3-32B, name: Qwen/Qwen3-32B}
  replicas: 3
  parallelism: {tensor: 2}
  router: {route: {}, gateway: {}, scheduler: {}}
  template:
    containers:
      - name: main
        image: ghcr.io/llm-d/llm-d:v0.2.0
        resources: {limits: {nvidia.com/gpu: "2"}}
        env:
          - {name: VLLM_ADDITIONAL_ARGS, value: "--max-num-seqs 128"}
""",
        settings={"model": "Qwen/Qwen3-32B", "replicas": 3, "parallel.tensor": 2, "scheduler.max_num_seqs": 128},
    ),
    "ray-serve": Written(
        text="""applications:
- name: llms
  import_path: ray.serve.llm:build_openai_app
  route_prefix: /
  args:
    llm_configs:
      - model_loading_config:
          model_id: qwen-32b
          model_source: Qwen/Qwen3-32B
        accelerator_type: H100
        deployment_config:
          autoscaling_config: {min_replicas: 2, max_replicas: 2}
        engine_kwargs:
          tensor_parallel_size: 4
          max_model_len: 8192
          gpu_memory_utilization: 0.9
""",
        settings={
            "model": "Qwen/Qwen3-32B",
            "parallel.tensor": 4,
            "memory.max_model_len": 8192,
            "hardware": "h100-sxm",
            "replicas": 2,
        },
    ),
    "docker-another-engine": Written(
        text="docker run --gpus all ghcr.io/huggingface/text-generation-inference:3.0 --model-id Qwen/Qwen3-8B --num-shard 2",
        refused="text-generation-inference",
    ),
}
