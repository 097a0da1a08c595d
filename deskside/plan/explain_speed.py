"""The seconds of a step, item by item: what is done, divided by what the device does per second."""

from deskside.budget import formats, operators, speed
from deskside.budget.host import REPEATED, host_seconds, together
from deskside.budget.operators import Operator, step_operators
from deskside.budget.shape import attention_span, block_matrices, matmul_params, root_params
from deskside.budget.speed import ITEM_OF, Rates, operator_seconds, step_seconds
from deskside.budget.step_spec import StepSpec
from deskside.config.model import ModelConfig
from deskside.plan.estimate import Estimate, StageSetting
from deskside.plan.formula import Line, plain, product
from deskside.plan.request import Request


def lines(request: Request, found: Estimate, item: str) -> list[Line]:
    """How an item of `step_seconds` comes about. Of a run with stages, the last stage, then the mean."""
    rates, stages = request.calibration.rates, list(found.setting.step_specs())
    _, shape, spec = stages[-1]
    if item == "host":
        return _host(rates, stages, found)
    result: list[Line] = []
    total = 0.0
    for operator in step_operators(shape, spec):
        if _item(operator) != item or operator.amount == 0:
            continue
        seconds = operator_seconds(operator, rates, spec)
        total += seconds
        formula, filled = amount(operator, shape, spec)
        unit = _unit(operator)
        result.append(Line(_name(operator), formula, filled, operator.amount, unit))
        result.append(_price(operator, rates, spec, seconds))
    if not result:
        return [Line(item, "nothing of this kind in this run", "0", 0.0, "s")]
    name = item if len(stages) == 1 else f"{item}, last stage"
    parts = [line.value for line in result if line.unit == "s"]
    result.append(Line(name, "their sum", " + ".join(plain(part) for part in parts), total, "s"))
    if len(stages) > 1:
        each = []
        for stage, stage_shape, stage_work in stages:
            seconds = sum(
                operator_seconds(o, rates, stage_work)
                for o in step_operators(stage_shape, stage_work)
                if _item(o) == item
            )
            each.append((stage.share, seconds))
        filled = " + ".join(product(share, seconds) for share, seconds in each)
        result.append(
            Line(item, "mean over the stages, by their share of the steps", filled, found.step[item], "s")
        )
    return result


def _name(operator: Operator) -> str:
    """With the format that a product of a quantised run is computed in."""
    low = operator.runs_as not in ("fp32", "bf16") or operator.share < 1
    return f"{operator.name}, {operator.runs_as}" if low and operator.group != "quantize" else operator.name


def _host(
    rates: Rates, stages: list[tuple[StageSetting, ModelConfig, StepSpec]], found: Estimate
) -> list[Line]:
    """Explain what the device waits for the host (`budget/host.py`), stage by stage."""
    result, parts = [], []
    for stage, shape, spec in stages:
        host = rates.host
        needed = host_seconds(shape, spec, host)
        if needed == 0:
            continue
        layers = shape.num_hidden_layers * spec.accumulation
        if spec.fused:
            words = "this host against the reference x (layers x passes x (layer + repeated) + step + Muon)"
            again = 1 + REPEATED[spec.activation_checkpointing]
            muon = host.muon if spec.optimizer == "muon" else 0.0
            filled = (
                f"{plain(host.factor)} x ({product(layers, host.of_layer(spec), again)} + {plain(host.step)} + "
                f"{plain(muon)})"
            )
        else:
            words = "this host against the reference x layers x passes x layer"
            filled = product(host.factor, layers, host.attention)
        result.append(Line(f"host, rows of {stage.sequence_length}", words, filled, needed, "s"))
        busy = sum(s for name, s in step_seconds(shape, spec, rates).items() if name != "host")
        waited = together(busy, needed, host.overlap) - busy
        p = plain(host.overlap)
        result.append(
            Line(
                "  waited for",
                "(device^p + host^p)^(1 / p) - device",
                f"({plain(busy)} ^ {p} + {plain(needed)} ^ {p}) ^ (1 / {p}) - {plain(busy)}",
                waited,
                "s",
            )
        )
        parts.append((stage.share, waited))
    if not result:
        return [Line("host", "the device is not known to wait for the host here", "0", 0.0, "s")]
    filled = " + ".join(product(share, seconds) for share, seconds in parts)
    result.append(
        Line("host", "mean over the stages, by their share of the steps", filled, found.step["host"], "s")
    )
    return result


def amount(operator: Operator, shape: ModelConfig, spec: StepSpec) -> tuple[str, str]:
    """(formula, with numbers) of an operator's FLOPs, bytes or count."""
    if operator.group == "quantize":
        return _quantizing(operator, shape, spec)
    formula, filled = _amount(operator, shape, spec)
    if operator.share == 1:
        return formula, filled
    return f"share that runs so x {formula}", f"{plain(operator.share)} x {filled}"


def _quantizing(operator: Operator, shape: ModelConfig, spec: StepSpec) -> tuple[str, str]:
    """What converting moves: FP8's producers move more by a share, NVFP4 counts its values."""
    of_blocks = f"{plain(operator.share)} x "
    if operator.name == "quantising to FP8":
        extra = operator.amount / operator.share
        more = formats.FP8_TRAFFIC - 1
        return (
            "quantised blocks x what FP8 moves more x element-wise bytes that are converted",
            f"{of_blocks}{plain(more)} x {plain(extra / more)}",
        )
    if operator.name == "quantising with own scales":
        each = formats.OWN_SCALE_BYTES
        return (
            "quantised blocks x bytes per value x values (what enters and what leaves a projection)",
            f"{of_blocks}{plain(each)} x {plain(operator.amount / operator.share / each)}",
        )
    each = formats.nvfp4_bytes(spec.native) * formats.NVFP4_WORK[spec.precision]
    return (
        "quantised blocks x bytes per value and product x values (what enters and what leaves a projection)",
        f"{of_blocks}{plain(each)} x {plain(operator.amount / operator.share / each)}",
    )


def _amount(operator: Operator, shape: ModelConfig, spec: StepSpec) -> tuple[str, str]:
    """The same of everything else, before the share that runs in one format."""
    tokens, layers, D = spec.tokens // spec.gpus, shape.num_hidden_layers, shape.hidden_size
    q, kv = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    unit = 4 if spec.precision == "fp32" else 2
    inside = (
        shape.num_experts_per_tok * shape.moe_intermediate_size
        if shape.num_experts
        else shape.intermediate_size
    )
    mlp = (matmul_params(shape) - shape.vocab_size * D) // layers - D * (2 * q + 2 * kv)
    spans = operators.attention_spans(shape, spec)
    counted = operators.units_of(spec)
    norm = counted.norm * tokens * layers * unit * D
    rope = tokens * layers * unit * (counted.rope * (q + kv) + counted.rope_keys * kv)
    units = counted.gated if shape.gated_mlp else counted.plain
    activation = units * tokens * layers * unit * inside
    half = operators.RECOMPUTED
    adamw, muon = operators.adamw_bytes(spec), operators.muon_bytes(spec)
    parameters, matrices = operators.trained_params(shape, spec), block_matrices(shape)
    each = 2 if operator.recompute else operators.product_flops(spec)
    shards = spec.gpus if spec.sharded else 1
    share = (spec.gpus - 1) / spec.gpus
    again = operator.recompute
    table: dict[str, tuple[str, str]] = {
        "attention projections": (
            f"{each} x tokens x layers x hidden x (2 q + 2 kv)",
            f"{product(each, tokens, layers, D)} x (2 x {q} + 2 x {kv})",
        ),
        "MLP": (
            f"{each} x tokens x layers x MLP weights",
            product(each, tokens, layers, mlp),
        ),
        "head": (f"{each} x tokens x hidden x vocabulary", product(each, tokens, D, shape.vocab_size)),
        "adapters": ("6 x tokens x parameters of adapters", product(6, tokens, parameters)),
        "attention": (
            f"{4 if again else 12} x q x tokens seen, summed over layers x tokens",
            product(4 if again else 12, q, spans[False], tokens),
        ),
        "attention, windowed": (
            f"{4 if again else 12} x q x tokens seen, summed over layers with a window x tokens",
            product(4 if again else 12, q, spans[True], tokens),
        ),
        "norms and residuals": (
            f"{counted.norm:g} x tokens x layers x bytes x hidden",
            product(counted.norm, tokens, layers, unit, D),
        ),
        "QK-norm and RoPE": (
            f"tokens x layers x bytes x ({counted.rope:g} x (q + kv) + {counted.rope_keys:g} x kv)",
            f"{product(tokens, layers, unit)} x ({counted.rope:g} x ({q} + {kv}) + {counted.rope_keys:g} x {kv})",
        ),
        "activation": (
            f"{units:g} x tokens x layers x bytes x MLP width",
            product(units, tokens, layers, unit, inside),
        ),
        "loss": (
            f"{operators.loss_units(spec):g} x tokens x bytes x vocabulary",
            product(operators.loss_units(spec), tokens, unit, shape.vocab_size),
        ),
        "weights": (
            f"{operators.WEIGHT_BYTES} x parameters x passes that cast and add up outside of products",
            product(
                operators.WEIGHT_BYTES,
                parameters,
                operators.weight_passes(spec) if spec.adapter is None else spec.accumulation,
            ),
        ),
        "layers": ("layers x passes", product(layers, spec.accumulation)),
        "Muon, Newton-Schulz": (
            "steps x (4 x long x short^2 + 2 x short^3), over all matrices",
            plain(operators.newton_schulz_flops(shape)),
        ),
        "Muon": (f"{muon:g} x weights of the blocks", product(muon, matrices)),
        "AdamW": (
            f"{adamw:g} x its parameters / shards",
            f"{product(adamw, parameters - (matrices if spec.optimizer == 'muon' else 0))} / {shards}",
        ),
        "FSDP": (
            "4 bytes x (passes x (2 x parameters - those in no block) + parameters) x (GPUs - 1) / GPUs",
            f"4 x ({spec.accumulation} x ({product(2, parameters)} - {plain(root_params(shape))}) "
            f"+ {plain(parameters)}) x {plain(share)}",
        ),
        "Muon, gathered": (
            "2 bytes x weights of the blocks x (GPUs - 1) / GPUs",
            product(2, matrices, share),
        ),
        "states up, and down meanwhile": (
            "bytes of the states of matrices and tables, each way",
            plain(operator.amount),
        ),
        "all-reduce": ("2 x 4 bytes x parameters x (GPUs - 1) / GPUs", product(2, 4, parameters, share)),
    }
    if again and operator.name == "QK-norm and RoPE":
        return f"{half:g} x (QK-norm and RoPE + norms / 2)", f"{half:g} x ({plain(rope)} + {plain(norm)} / 2)"
    if again and operator.name == "activation":
        return f"{half:g} x (activation + norms / 2)", f"{half:g} x ({plain(activation)} + {plain(norm)} / 2)"
    return table.get(operator.name, ("as counted by budget/operators.py", plain(operator.amount)))


def flops_per_token_lines(found: Estimate) -> list[Line]:
    """FLOPs per token of the last stage, and the mean over the stages."""
    *_, (stage, shape, spec) = found.setting.step_specs()
    layers = shape.num_hidden_layers
    span = sum(attention_span(spec.sequence_length, shape.layer_window(i)) for i in range(layers))
    q = shape.num_attention_heads * shape.head_dim
    weights = matmul_params(shape)
    value = 6 * weights + 12 * q * span
    result = [
        Line(
            "FLOPs per token" if stage.share == 1 else "last stage",
            "6 x weights that a token meets + 12 x heads x head_dim x tokens seen, summed over layers",
            f"{product(6, weights)} + {product(12, q, span)}",
            value,
            "FLOP",
        )
    ]
    if stage.share != 1:
        mean = found.setting.flops_per_token
        result.append(Line("FLOPs per token", "mean over the stages", plain(mean), mean, "FLOP"))
    return result


def _price(operator: Operator, rates: Rates, spec: StepSpec, seconds: float) -> Line:
    """seconds = correction x amount / (rate x efficiency)."""
    e, group = rates.efficiency_of(spec), operator.group
    amounts = plain(operator.amount)
    if group == "layers":
        return Line(
            "  takes",
            "count x delay x correction",
            f"{amounts} x {plain(e.layer_seconds)} x {plain(rates.delay)}",
            seconds,
            "s",
        )
    if group in ("communication", "offload"):
        rate = rates.link_bandwidth if group == "communication" else rates.host_bandwidth
        between = "between GPUs" if group == "communication" else "to the host, each way"
        return Line("  takes", f"bytes / bandwidth {between}", f"{amounts} / {plain(rate)}", seconds, "s")
    is_product = group in ("matmul", "head", "optimizer_matmul", "attention")
    rate = speed.product_rate(operator, rates) if is_product else rates.bandwidth
    correction = rates.compute if is_product else rates.memory
    # The efficiency is what remains, so that the line is what was computed, whatever group it came from.
    share = correction * operator.amount / (rate * seconds)
    what = "bandwidth"
    if is_product:
        low = {"fp8": "large FP8 rate", "nvfp4": "large NVFP4 rate", "emulated": "rate of emulated products"}
        what = low.get(operator.runs_as, "large matmul rate")
    return Line(
        "  takes",
        f"correction x amount / ({what} x efficiency)",
        f"{plain(correction)} x {amounts} / ({plain(rate)} x {plain(share)})",
        seconds,
        "s",
    )


def _item(operator: Operator) -> str:
    return "recompute" if operator.recompute else ITEM_OF[operator.group]


def _unit(operator: Operator) -> str:
    if operator.group in ("matmul", "head", "optimizer_matmul", "attention"):
        return "FLOP"
    return "times" if operator.group == "layers" else "bytes"
