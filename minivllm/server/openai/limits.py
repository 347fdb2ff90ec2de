"""Checks of a request against the limits of the server: counts, cost, time, and options of its usage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from minivllm.server.errors import ApiError
from minivllm.server.link.client import params_to_json
from minivllm.server.worker_pool import to_json

if TYPE_CHECKING:
    from minivllm.core.interfaces.params import SamplingParams
    from minivllm.server.link.taps import PooledTaps

    from .generate import Service

CPU_COST, COST = 1 << 15, 1 << 20  # default limit of a request's cost in tokens, on a CPU and on other devices
ASSUMED_TOKENS = 512  # number of tokens that is assumed for an answer without a limit of the client
SCORED = 20  # number of log-probabilities of one token that cost as much as the token


def stream_options(body: Any) -> tuple[bool, bool]:
    """Return whether a stream reports the usage at its end, and whether in every chunk.

    ApiError (400) for options of a stream in a request without one."""
    options = body.stream_options
    if body.include_energy and body.stream and not (options and options.include_usage):
        text = "include_energy: expected stream_options.include_usage with it, because the usage reports the joules"
        raise ApiError(400, text, "include_energy")
    if options is None:
        return False, False
    if not body.stream:
        raise ApiError(400, "stream_options: expected only with stream=true", "stream_options")
    every = bool(options.continuous_usage_stats) and options.include_usage is not False
    return bool(options.include_usage) or every, every


def reports_energy(service: Service, body: Any) -> bool:
    """Return whether the usage reports joules.  ApiError (400) if the server does not measure them."""
    if body.include_energy and not service.client.info.energy:
        text = "include_energy: this server does not measure joules; start it with --set energy=on"
        raise ApiError(400, text, "include_energy")
    return bool(body.include_energy)


def check_counts(service: Service, n: int | None, best_of: int | None = None) -> None:
    """Raise ApiError (400) for more answers or samples of a prompt than the server allows."""
    most = service.server.max_n
    answers = 1 if n is None else n
    if not 1 <= answers <= most:
        raise ApiError(400, f"n={str(n)[:24]}: expected a whole number from 1 to {most}", "n")
    if best_of is not None and not answers <= best_of <= most:
        text = f"best_of={str(best_of)[:24]}: expected a whole number from n={answers} to {most}"
        raise ApiError(400, text, "best_of")


def width_name(params: SamplingParams) -> str:
    """Return the field that sets the number of branches of a prompt: beam_width, best_of or n."""
    if params.beam_width is not None:
        return "beam_width"
    return "n" if params.best_of is None else "best_of"


def check_branches(service: Service, prompts: int, params: SamplingParams) -> None:
    """Raise ApiError (400) for more branches of all prompts together than a request may have.

    A branch is an answer (``n``), a sample that may become one (``best_of``), or a beam."""
    most, branches = service.server.max_branches, prompts * params.width
    if branches > most:
        name = width_name(params)
        text = f"{prompts} prompt{'s' * (prompts > 1)} times {name}={params.width} are {branches} branches"
        raise ApiError(400, f"{text}; expected at most {most} in a request (max_branches)", name)


def check_cost(service: Service, prompts: Sequence[tuple[Any, SamplingParams]], unlimited: bool = False) -> None:
    """Raise ApiError (400) for a request that would keep the engine busy for too long.

    ``prompts`` has the token ids and the parameters of each prompt.  ``unlimited`` means that the client has not set
    ``max_tokens``, so the model determines the length of the answers."""
    info, most = service.client.info, service.server.max_request_cost
    if most is None:
        most = max(CPU_COST if info.device == "cpu" else COST, 2 * info.max_model_len)
    costs = [_cost(len(ids), params, unlimited) for ids, params in prompts]
    cost = sum(costs)
    if not most or cost <= most:
        return
    params = prompts[0][1]
    answer_scores = params.logprobs or 0
    scores = max(answer_scores, params.prompt_logprobs or 0)
    shape = f"prompts: {len(prompts)}, {width_name(params)}={params.width}, max_tokens={params.max_tokens}"
    if scores:
        shape += f", log-probabilities of each token: {scores}"
    text = f"this request may cost {round(cost):,} tokens ({shape}); expected at most {most:,} (max_request_cost)"
    raise ApiError(400, f"{text}: lower one of them, or send several requests", "max_tokens")


def _cost(prompt: int, params: SamplingParams, unlimited: bool) -> float:
    """Return the cost of a prompt of ``prompt`` tokens and its answers, in tokens."""
    answer = params.max_tokens or 0
    if unlimited and not params.ignore_eos:
        answer = min(answer, ASSUMED_TOKENS)
    prompt_cost = prompt * (1 + (params.prompt_logprobs or 0) / SCORED)
    answer_cost = answer * (1 + (params.logprobs or 0) / SCORED)
    return prompt_cost + params.width * answer_cost


def check_size(service: Service, prompts: int, params: SamplingParams, taps: PooledTaps) -> None:
    """Raise ApiError (400) for parameters and taps that are too large.

    The server sends them to the engine once for each prompt, so their size counts for each prompt."""
    if prompts == 1:
        return
    most = service.server.max_body_bytes
    written = to_json(params_to_json(params))
    size = len(written) + taps.bytes
    if size * prompts > most:
        text = f"the parameters of this request are {size} bytes for each of {prompts} prompts"
        raise ApiError(400, f"{text}; expected at most {most} together: send fewer prompts at once", "prompt")


def seconds_of(service: Service, requested: float | None) -> float:
    """Return the time limit of a request, in seconds: ``timeout_s`` of the request, at most the server's own.  ApiError
    (400) if it is not positive."""
    most = service.server.request_timeout
    if requested is None:
        return most
    if not requested > 0:
        raise ApiError(400, f"timeout_s={requested}: expected a positive number of seconds", "timeout_s")
    return min(requested, most)
