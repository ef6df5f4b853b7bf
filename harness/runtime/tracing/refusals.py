"""Explain in one line why a model cannot be captured: the construct, its place, the remedy."""

from __future__ import annotations

import re
import traceback

from harness.errors import WITHOUT_PLAN, HarnessError, ModelError, first_line
from harness.inputs import one_line
from harness.runtime.ranks.failures import users_line
from harness.runtime.tracing.constructs import ConstructError

_REMEDY = f"or {WITHOUT_PLAN}"
_LONGEST = 100  # characters quoted from PyTorch's message
_REWRITE = "rewrite that part"
_AT_ONCE = "compute on all samples at once"
_VALUES = "use torch.where or a mask"
# Pattern in a message of torch.fx, torch.export or meta tensors, or in the functions of its
# traceback; the construct; its remedy.
_CONSTRUCTS = (
    (
        r"\bpack_padded_sequence\b|zeros\(\): argument 'size' failed to unpack",
        "forward packs sequences, so that shapes depend on their lengths",
        "give pack_padded_sequence a tensor of lengths, and its result to an RNN alone",
    ),
    (
        r"\b_compute_mask_indices\b",
        "forward draws the masks of SpecAugment by numpy",
        "set apply_spec_augment=False in the configuration",
    ),
    (
        r"\b_ctc_loss\b",
        "forward computes a CTC loss over lengths",
        "return the mean of the samples' losses, and by name the log-probabilities that it reads",
    ),
    (r"'len' is not supported", "forward takes len() of a tensor", "take x.shape[0]"),
    (
        r"Proxy object cannot be iterated",
        "forward loops over the samples or elements of a tensor, or unpacks it",
        _AT_ONCE,
    ),
    (
        r"Proxy' object cannot be interpreted as an integer",
        "forward takes a size of a tensor as an integer, such as range(x.shape[0])",
        _AT_ONCE,
    ),
    (
        r"cannot be used as inputs to control flow|Could not guard on data-dependent",
        "forward decides by the values of a tensor (if, while, assert)",
        _VALUES,
    ),
    (
        r"item\(\) cannot be called on meta|Could not extract specialized integer"
        r"|_local_scalar_dense",
        "forward reads the value of a tensor (item(), int(), if)",
        _VALUES,
    ),
    (
        r"expected np\.ndarray|\.numpy\(\) is not supported|can't convert meta|NumPy",
        "forward computes by numpy",
        "compute by torch",
    ),
    (
        r"aten(\.|::)equal\b(?!.*\bfold_constants\b)",  # which asks so itself
        "forward asks whether two tensors are equal, as torch.cov, corrcoef and istft do",
        "use torch.where, a product of centred values, or irfft and F.fold",
    ),
    (
        r"\(\) raises unimplemented|with Meta tensors, but there was|data-dependent output"
        r"|aten\.(nonzero|_unique|masked_select)",
        "the shape of a tensor depends on values (nonzero, unique, an index that is a mask)",
        _VALUES,
    ),
    (
        r"device cpu is not on the expected device meta|at least two devices",
        "forward makes a tensor on the CPU, wherever its input is",
        "give it device=x.device",
    ),
    (
        r"Cannot copy out of meta tensor",
        "forward moves a tensor to the CPU, or a hook uses a tensor of another module",
        "leave it on the device of its input, and let a hook use its own module alone",
    ),
    (
        r"_will_engine_execute_node|element 0 of tensors does not require grad",
        "forward calls torch.autograd.grad",
        "put all that it differentiates into a module of its own",
    ),
    (
        r"\b(grad_and_value_impl|_vjp_with_argnums)\b",
        "forward differentiates by torch.func",
        "put all that it differentiates into a module of its own",
    ),
    (
        r"Sparse(Meta|CPU|CUDA)|aten::.*sparse",
        "forward computes with a sparse tensor",
        "make it dense, or sum over its entries by index_add",
    ),
    (
        r"Proxy' object has no attribute",
        "forward reads an attribute that tensors have only while they are computed",
        "compute by torch's functions",
    ),
    (
        r"attribute '(code|graph)' already exists|Code has not been generated",
        "the model has a member with the name 'code' or 'graph', which torch.fx uses itself",
        "give it another name",
    ),
    (
        r"Expected positional argument for parameter|missing a required argument",
        "forward takes more tensors than it is fed",
        "give the others a default",
    ),
)


def refusal(name: str, *reasons: Exception) -> ModelError:
    """The error for a model that cannot be captured.

    Args:
        reasons: the error of each way to capture it; the last that names a construct counts, or
            a line of the user's code.
    """
    for error in reversed(reasons):
        if isinstance(error, ConstructError):
            return _error(name, first_line(error), error, "")
    for error in reversed(reasons):
        called = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
        text = " ".join([str(error), *getattr(error, "__notes__", ()), *called])
        for pattern, construct, remedy in _CONSTRUCTS:
            if re.search(pattern, text):
                return _error(name, construct, error, remedy)
        if users_line(error) and not isinstance(error, HarnessError):
            # Errors of other ways would name what this one can follow, but for what we know.
            known = next((each for each in reasons if isinstance(each, HarnessError)), None)
            if known is not None:
                return _error(name, first_line(known), known, "")
            return _error(name, _message(error), error, _REWRITE)
    messages = "; ".join(dict.fromkeys(map(_message, reasons)))
    placed = next(filter(_place, reasons), reasons[0])
    return _error(name, messages, placed, _REWRITE)


def _error(name: str, construct: str, error: Exception, remedy: str) -> ModelError:
    place = _place(error)
    where = f" ({place})" if place else ""
    do = f": {remedy}, {_REMEDY}" if remedy else f", {_REMEDY}"
    return ModelError(f"{name} cannot be captured: {construct}{where}{do}")


def _place(error: Exception) -> str:
    """The line of the user's code, or the operator that was running."""
    operator = re.search(r"While executing %(\w+)", str(error))
    return users_line(error) or (f"operator {operator[1]!r}" if operator else "")


def _message(error: Exception) -> str:
    """The first sentence of an error."""
    text = one_line(first_line(error))
    if isinstance(error, HarnessError):
        return text
    text = f"{type(error).__name__}: {text.partition('. ')[0]}"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
