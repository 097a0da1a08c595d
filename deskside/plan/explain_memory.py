"""The memory of a step, item by item, at the instant of its peak (`budget/memory.py` has the four instants)."""

from deskside.budget import adapters, memory, states
from deskside.budget.formats import weight_copies
from deskside.budget.shape import block_matrices, num_params, root_params
from deskside.budget.step_spec import AdapterSpec, StepSpec
from deskside.config.model import ModelConfig
from deskside.plan.estimate import Estimate
from deskside.plan.formula import Line, plain, product
from deskside.plan.request import Request
from deskside.utils.format import gib


def lines(request: Request, found: Estimate, item: str) -> list[Line]:
    """How one of `Memory.items` comes about, in the stage that needs most."""
    shape, spec = _hungriest(found)
    value = found.memory.items[item]
    if spec.adapter is not None:
        return _adapted(shape, spec, spec.adapter, found.memory.instant, item, value)
    parts, text = {
        "weights": _weights,
        "gradients": _gradients,
        "optimizer": _optimizer,
        "copies": _copies,
        "activations": _activations,
        "logits": _logits,
        "workspace": _workspace,
    }[item](shape, spec, found.memory.instant)
    formula, filled = text
    return [*parts, Line(f"{item}, at the instant '{found.memory.instant}'", formula, filled, value, "bytes")]


def _adapted(
    shape: ModelConfig, spec: StepSpec, adapter: AdapterSpec, instant: str, item: str, value: int
) -> list[Line]:
    """The same where adapters train beside frozen weights."""
    trained = adapters.adapter_params(shape, adapter)
    frozen = adapters.frozen_bytes(shape, adapter)
    name = f"{item}, at the instant '{instant}'"
    text = ("as counted by budget/memory.py", plain(value))
    told: list[Line] = []
    if item == "weights":
        per_weight = adapters.matrix_bytes(shape, adapter) / block_matrices(shape)
        told = [
            Line(
                f"frozen in {adapter.base}",
                "weights of the blocks x bytes of one + 2 bytes x embedding and head + 4 bytes x vectors",
                f"{product(block_matrices(shape), per_weight)} + {product(2, root_params(shape))} + "
                f"{product(4, num_params(shape) - block_matrices(shape) - root_params(shape))}",
                frozen,
                "bytes",
            )
        ]
        text = ("frozen weights + 4 bytes x what trains", f"{plain(frozen)} + {product(4, trained)}")
    elif item == "gradients" and value:
        text = ("4 bytes x what trains", product(4, trained))
    elif item == "optimizer" and not spec.offload_optimizer:
        each = states.ADAMW_STATE[spec.states]
        text = (f"{plain(each)} bytes x what trains", product(each, trained))
    return [*told, Line(name, *text, value, "bytes")]


def needed(request: Request, found: Estimate) -> list[Line]:
    """From the peak of allocated bytes to what must be in the card's memory."""
    calibration, peak = request.calibration, found.memory
    low, expected, high = found.memory_bytes
    items = {name: size for name, size in peak.items.items() if size}
    context, spread = plain(calibration.overhead_bytes), plain(calibration.memory_spread)
    reserved = plain(peak.reserved)
    return [
        Line(
            "peak allocated",
            " + ".join(items),
            [float(s) for s in items.values()],
            peak.allocated,
            "bytes",
            " + ",
        ),
        Line(
            "reserved",
            "allocated x (1 + fragments) + fragments",
            f"{plain(peak.allocated)} x (1 + {memory.RESERVED_SHARE}) + {plain(memory.RESERVED_BYTES)}",
            peak.reserved,
            "bytes",
        ),
        Line("needed", "reserved + CUDA context", f"{reserved} + {context}", expected, "bytes"),
        Line(
            "low",
            "reserved x (1 - spread) + context",
            f"{reserved} x (1 - {spread}) + {context}",
            low,
            "bytes",
        ),
        Line(
            "high",
            "reserved x (1 + spread) + context",
            f"{reserved} x (1 + {spread}) + {context}",
            high,
            "bytes",
        ),
        Line("there is", gib(found.capacity), plain(found.capacity), found.capacity, "bytes"),
    ]


Text = tuple[str, str]
Told = tuple[list[Line], Text]


def _hungriest(found: Estimate) -> tuple[ModelConfig, StepSpec]:
    tried = [(shape, spec) for _, shape, spec in found.setting.step_specs()]
    return max(tried, key=lambda pair: memory.training_memory(*pair).reserved)


def _shards(spec: StepSpec) -> int:
    return spec.gpus if spec.sharded else 1


def _width(spec: StepSpec) -> int:
    return 2 if spec.precision == "fp32" else 1


def _weights(shape: ModelConfig, spec: StepSpec, instant: str) -> Told:
    return [], ("4 bytes x parameters / shards", f"{product(4, num_params(shape))} / {_shards(spec)}")


def _gradients(shape: ModelConfig, spec: StepSpec, instant: str) -> Told:
    parameters, shards = num_params(shape), _shards(spec)
    if instant == "update" or (shards == 1 and (instant == "gradients" or spec.accumulation > 1)):
        return [], ("4 bytes x parameters / shards", f"{product(4, parameters)} / {shards}")
    if spec.accumulation > 1:
        return [], ("4 bytes x parameters, whole until the last pass of a step", product(4, parameters))
    if instant == "gradients":
        root = root_params(shape)
        return [], (
            "4 bytes x (parameters of the blocks / shards + the others, which are scattered last)",
            f"4 x (({plain(parameters)} - {plain(root)}) / {shards} + {plain(root)})",
        )
    if instant == "loss":
        return [], ("the only pass of a step has none yet", "0")
    return [], (
        "the head's: 4 bytes x vocabulary x hidden",
        product(4, shape.vocab_size, shape.hidden_size),
    )


def _optimizer(shape: ModelConfig, spec: StepSpec, instant: str) -> Told:
    if spec.states != "float32" or spec.offload_optimizer:
        return _light_states(shape, spec)
    if spec.optimizer == "adamw":
        return [], ("8 bytes x parameters / shards", f"{product(8, num_params(shape))} / {_shards(spec)}")
    matrices = block_matrices(shape)
    rest = num_params(shape) - matrices
    return [], (
        "(4 bytes x weights of the blocks (Muon) + 8 bytes x the others (AdamW)) / shards",
        f"({product(4, matrices)} + {product(8, rest)}) / {_shards(spec)}",
    )


def _light_states(shape: ModelConfig, spec: StepSpec) -> Told:
    matrices, tables = block_matrices(shape), root_params(shape)
    vectors = num_params(shape) - matrices - tables
    adamw = states.ADAMW_STATE[spec.states]
    block = states.MUON_STATE[spec.states] if spec.optimizer == "muon" else adamw
    if not spec.offload_optimizer:
        return [], (
            "(bytes x weights of the blocks + bytes x embeddings and head + 8 bytes x vectors) / shards",
            f"({product(block, matrices)} + {product(adamw, tables)} + {product(8, vectors)}) / {_shards(spec)}",
        )
    held = states.state_bytes(shape, spec)
    if held.buffers < states.BUFFERS * held.streamed:
        words, buffers = (
            "buffers x weights of one x bytes",
            product(states.BUFFERS, states.PIECE, max(block, adamw)),
        )
    else:
        words, buffers = "buffers x all that is streamed", product(states.BUFFERS, held.streamed)
    return [], (f"{words}, + 8 bytes x vectors", f"{buffers} + {product(8, vectors)}")


def _copies(shape: ModelConfig, spec: StepSpec, instant: str) -> Told:
    if memory.has_cache(spec):
        return _cached(shape, spec, instant)
    if instant not in ("loss", "backward") or spec.precision == "fp32":
        return [], ("no copies are kept at this instant", "0")
    matrices = block_matrices(shape)
    attention = _attention_matrices(shape)
    kept = {"none": matrices, "attention": matrices - attention, "mlp": attention, "block": 0}
    weights = kept[spec.activation_checkpointing] if spec.copies == "pass" else 0
    if instant == "loss":
        return [], (
            "2 bytes x (weights of the blocks that are not recomputed + vocabulary x hidden)",
            f"2 x ({plain(weights)} + {product(shape.vocab_size, shape.hidden_size)})",
        )
    return [], ("2 bytes x weights of the blocks that are not recomputed", product(2, weights))


def _cached(shape: ModelConfig, spec: StepSpec, instant: str) -> Told:
    """Converted weights that stay from step to step."""
    blocks, kept, table = shape.num_hidden_layers, spec.kept_blocks, shape.vocab_size * shape.hidden_size
    low, plain_ = weight_copies(spec.precision, spec.native), weight_copies("bf16", spec.native)
    words = [f"weights of the blocks x their copies' bytes in {spec.precision}"]
    terms = [f"{plain(block_matrices(shape))} x {plain(low)}"]
    if kept or spec.kept_weights:
        words = [
            f"weights of the blocks x (share in {spec.precision} x its copies' bytes + share in BF16 x 2)"
        ]
        shares = f"{blocks - kept} / {blocks} x {plain(low)} + {kept} / {blocks} x {plain(plain_)}"
        if spec.kept_weights:
            share = spec.quantized_share(blocks)
            shares = f"{plain(share)} x {plain(low)} + {plain(1 - share)} x {plain(plain_)}"
        terms = [f"{plain(block_matrices(shape))} x ({shares})"]
    if spec.fp8_head:
        words.append("the head's copies in FP8")
        terms.append(f"{plain(weight_copies('fp8', spec.native))} x {plain(table)}")
    elif instant == "loss":
        words.append("2 bytes x vocabulary x hidden")
        terms.append(f"2 x {plain(table)}")
    return [], (" + ".join(words), " + ".join(terms))


def _activations(shape: ModelConfig, spec: StepSpec, instant: str) -> Told:
    if instant == "update":
        return [], ("none are left at the update", "0")
    told, layer = _layer(shape, spec)
    D, width, layers = shape.hidden_size, _width(spec), shape.num_hidden_layers
    normed = 2 * width * D - D * _less(shape, spec)
    each = memory.ENDS if not spec.fused else memory.END if instant == "loss" else 0
    ends = f"{product(each, D, width)}"
    if instant == "gradients":
        return told, (
            "tokens per pass x (one layer + ends of the stream)",
            f"{plain(spec.micro_tokens)} x ({plain(layer['block'])} + {ends})",
        )
    kept = {
        "none": layer["block"],
        "attention": layer["stream"] - normed + layer["mlp"],
        "mlp": layer["stream"] - normed + layer["attention"],
        "block": 4 * width * D,
    }[spec.activation_checkpointing]
    if spec.activation_checkpointing != "none":
        told.append(
            Line("kept per token and layer", "without what is recomputed", plain(kept), kept, "bytes")
        )
    return told, (
        "tokens per pass x (layers x kept per token and layer + ends of the stream)",
        f"{plain(spec.micro_tokens)} x ({product(layers, kept)} + {ends})",
    )


def _logits(shape: ModelConfig, spec: StepSpec, instant: str) -> Told:
    V, D, N = shape.vocab_size, shape.hidden_size, spec.micro_tokens
    if instant == "backward" and shape.tie_word_embeddings and spec.accumulation > 1:
        return [], ("the tied head's gradient: 4 bytes x vocabulary x hidden", product(4, V, D))
    if instant != "loss":
        return [], ("none at this instant", "0")
    chunk = min(spec.loss_chunk_tokens, N)
    logits = product(chunk, V, memory.logit_bytes(spec))
    hidden = product(memory.hidden_bytes(spec), N, D)
    return [], (
        "tokens of a chunk x vocabulary x bytes of all forms + head's gradient, at the head's FP8 products twice "
        "+ bytes of what is beside the last hidden states",
        f"{logits} + {product(memory.head_gradients(spec), 4, V, D)} + {hidden}",
    )


def _workspace(shape: ModelConfig, spec: StepSpec, instant: str) -> Told:
    D, matrices = shape.hidden_size, block_matrices(shape)
    told = [Line("libraries", "cuBLAS", plain(memory.LIBRARIES), memory.LIBRARIES, "bytes")]
    terms = [plain(memory.LIBRARIES)]
    words = ["libraries"]
    if instant == "update":
        stack = max(memory.STACK_WEIGHTS, D * max(shape.intermediate_size, shape.moe_intermediate_size))
        muon = memory.STACK_BYTES * min(matrices, stack) if spec.optimizer == "muon" else 0
        bucket = memory.bucket_bytes(shape, spec)
        if bucket > muon:
            words.append("bucket of gradients that are summed over the GPUs")
            terms.append(product(4, bucket // 4))
        elif muon:
            words.append("Muon's stack of matrices")
            terms.append(product(memory.STACK_BYTES, min(matrices, stack)))
        return told, (" + ".join(words), " + ".join(terms))
    if spec.sharded:
        gathered = 1 if instant == "gradients" else 2
        words += [f"{gathered} x a gathered layer", "4 bytes x gathered weights in no block"]
        terms += [
            f"{product(gathered, 4, matrices)} / {shape.num_hidden_layers}",
            product(4, root_params(shape)),
        ]
        several = spec.accumulation > 1
        if instant == "backward" or (instant == "gradients" and not several):
            words.append("gradients of a layer on their way")
            terms.append(f"{product(4 if several else 8, matrices)} / {shape.num_hidden_layers}")
    if instant in ("backward", "gradients"):
        layer_told, layer = _layer(shape, spec)
        if instant == "gradients" and spec.accumulation > 1:
            words.append("the head's gradient")
            terms.append(product(4, shape.vocab_size, D))
        rung = spec.activation_checkpointing
        told += layer_told
        if spec.fused:
            text = _half_gradients(shape, spec, layer, "last" if instant == "gradients" else rung)
            words.append(f"tokens per pass x {text[0]}")
            terms.append(f"{plain(spec.micro_tokens)} x ({text[1]})")
        elif instant == "gradients" or rung == "none":
            words.append("tokens per pass x temporary share x one layer")
            terms.append(product(spec.micro_tokens, memory.TEMPORARY, layer["block"]))
        else:
            again = {
                "attention": layer["attention"] + layer["stream"] // 2,
                "mlp": layer["mlp"] + layer["stream"] // 2,
                "block": layer["block"],
            }[rung]
            words.append("tokens per pass x recomputed part x its gradients")
            terms.append(product(spec.micro_tokens, again, memory.RECOMPUTE))
    return told, (" + ".join(words), " + ".join(terms))


def _half_gradients(shape: ModelConfig, spec: StepSpec, layer: dict[str, float], rung: str) -> Text:
    """Temporary gradients of the half that has most, with what it computes again. rung: or "last", where the backward
    ends in the first block's attention."""
    attention, mlp = (_width(spec) * size for size in memory.half_gradients(shape, spec))
    normed = shape.hidden_size * (_width(spec) - _less(shape, spec) / 2)
    whole_attention = ("(attention, what it read, its gradients)", (layer["attention"], normed, attention))
    whole_mlp = ("(MLP, what it read, its gradients)", (layer["mlp"], normed, mlp))
    only_mlp = ("gradients of the MLP half", (mlp,))
    after_mlp = ("(attention and its gradients - MLP)", (layer["attention"], attention, -layer["mlp"]))
    choices: dict[str, list[tuple[str, tuple[float, ...]]]] = {
        "last": [("gradients of the attention half", (attention,))],
        "none": [only_mlp],
        "attention": [only_mlp, after_mlp],
        "mlp": [whole_mlp],
        "block": [whole_mlp, whole_attention],
    }
    words, sizes = max(choices[rung], key=lambda choice: sum(choice[1]))
    return words, " + ".join(plain(size) for size in sizes)


def _attention_matrices(shape: ModelConfig) -> int:
    heads = shape.num_attention_heads + shape.num_key_value_heads
    return shape.num_hidden_layers * shape.hidden_size * 2 * heads * shape.head_dim


def _less(shape: ModelConfig, spec: StepSpec) -> float:
    """Bytes that a value which a weight gradient needs again takes less than 2."""
    return memory.SAVED_BF16 - memory.saved_per_value(shape, spec)


def _layer(shape: ModelConfig, spec: StepSpec) -> tuple[list[Line], dict[str, float]]:
    """Bytes that one layer keeps per token: residual stream and norms, attention, MLP."""
    D, H, K, C = shape.hidden_size, shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
    width, eager = _width(spec), not spec.compiled
    lines_: list[Line] = []
    per_channel = 6 if shape.qk_norm or shape.position_embedding == "rope" else 4
    norms = 4 * (H + K) + (8 * (H + K) * C if eager else 0) if shape.qk_norm and not spec.fused else 0
    less = _less(shape, spec)
    in_fp8 = " - normed inputs in FP8" if less else ""
    stream = width * ((20 if eager else 8) * D + 8) - 2 * D * less
    attention = width * (per_channel * (H + K) * C + 4 * H + norms) + H * C * less
    per_ffn = (8 if eager else 6) if shape.gated_mlp else 4
    lines_.append(
        Line(
            "stream and norms, per token and layer",
            f"{'20' if eager else '8'} hidden + 8{in_fp8}",
            f"{width} x ({product(20 if eager else 8, D)} + 8){f' - {product(2, D, less)}' if less else ''}",
            stream,
            "bytes",
        )
    )
    lines_.append(
        Line(
            "attention, per token and layer",
            f"{per_channel} x (heads + kv heads) x head_dim + their statistics{' + output in FP8' if less else ''}",
            f"{width} x ({per_channel} x ({H} + {K}) x {C} + {4 * H} + {norms})"
            f"{f' + {product(H, C, less)}' if less else ''}",
            attention,
            "bytes",
        )
    )
    if shape.num_experts:
        chosen, inside = shape.num_experts_per_tok, shape.moe_intermediate_size
        mlp: float = width * chosen * (per_ffn * inside + 4 * D)
        text = (
            "chosen experts x (6 x their width + 4 hidden)",
            f"{width} x {chosen} x ({product(per_ffn, inside)} + {4 * D})",
        )
    else:
        F = shape.intermediate_size
        mlp = width * per_ffn * F - F * less
        text = (f"{per_ffn} x MLP width", product(width, per_ffn, F))
        if less:
            text = (f"{per_ffn} x MLP width - its inside in FP8", f"{text[1]} - {product(F, less)}")
    lines_.append(Line("MLP, per token and layer", text[0], text[1], mlp, "bytes"))
    return lines_, {"stream": stream, "attention": attention, "mlp": mlp, "block": stream + attention + mlp}
