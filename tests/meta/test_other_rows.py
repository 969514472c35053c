"""A number of rows that was not there before: no check is made again, and results and errors stay."""

import functools
import math

import pytest
import torch

import tgl
from tgl.meta.components import SizedComponents, sized_components
from tgl.meta.formats import FORMATS
from tgl.meta.quantized import DequantizeOptions, Options
from tgl.meta.remembered import MADE
from tgl.meta.remembered import remembered as remembering

CPU, G, K, N = torch.device("cpu"), 3, 288, 160
OFFS = torch.zeros(G, dtype=torch.int32)
ROWS = (256, 300, 77, 2, 256, 129, 4000)
FEW = (1, 0)  # whose strides mean nothing, so that they may be checked again
LAYOUTS = [(f.name, layout) for f in FORMATS.values() for layout in f.layouts]


def made(format, layout, rows, k, **given):
    options = Options(format, scale_layout=layout, **given).resolved("op")
    return options, sized_components(options, (rows, k), G, CPU, grouped=True).empty()


def weight(format, layout):
    form = FORMATS[format]
    options = Options(format, scale_layout=layout, block_2d=form.square_scales).resolved("op")
    return sized_components(options, (G, N, K), G, CPU, grouped=False).empty()


def amaxes(format, *components):
    return [c.amax if FORMATS[format].decodes_with_amax else None for c in components]


def quantize(format, layout, rows):
    options, _ = made(format, layout, rows, K)
    return (torch.empty(rows, K), OFFS, None, torch.empty(rows)), {"options": options}


def quantize_out(format, layout, rows):
    args, options = quantize(format, layout, rows)
    return (*args, None, None, None, None, *made(format, layout, rows, K)[1]), options


def activation_quantize(format, layout, rows):
    options, _ = made(format, layout, rows, K)
    return (torch.empty(rows, 2 * K), OFFS, torch.empty(rows), None), {"kind": "swiglu", "options": options}


def dequantize(format, layout, rows, columnwise=False):
    _, c = made(format, layout, rows, K)
    data, scale = (c.columnwise_data, c.columnwise_scale) if columnwise else (c.data, c.scale)
    options = DequantizeOptions(format, columnwise=columnwise, scale_layout=layout)
    return (data, scale, OFFS, *amaxes(format, c)), {"options": options}


def requantize(format, layout, rows):
    options, c = made(format, layout, rows, K)
    return (c.data, c.scale, OFFS, *amaxes(format, c)), {"options": options}


def gemm(format, layout, rows):
    (_, a), b = made(format, layout, rows, K), weight(format, layout)
    operands = (a.data, a.scale, b.data, b.scale, OFFS, *amaxes(format, a, b))
    return (*operands, torch.empty(G, N), torch.empty(rows)), {"format": format, "scale_layout": layout}


def gemm_out(format, layout, rows):
    args, options = gemm(format, layout, rows)
    return args, {**options, "out": torch.empty(rows, N)}


def gemm_activation_quantize(format, layout, rows):
    args, _ = gemm(format, layout, rows)
    options = {"b_direction": "rowwise", "kind": "swiglu", "options": made(format, layout, rows, K)[0]}
    return (*args[:7], None, torch.empty(rows), None), {**options, "out_dtype": None}


def wgrad(format, layout, rows):
    a, b = (made(format, layout, rows, k)[1] for k in (K, N))
    operands = (a.columnwise_data, a.columnwise_scale, b.columnwise_data, b.columnwise_scale, OFFS)
    return (*operands, *amaxes(format, a, b)), {"format": format, "scale_layout": layout}


def wgrad_out(format, layout, rows):
    args, options = wgrad(format, layout, rows)
    return args, {**options, "out": torch.empty(G, K, N)}


def wgrad_accumulate(format, layout, rows):
    args, options = wgrad(format, layout, rows)
    return (*args[:5], torch.empty(G, K, N), *args[5:]), options


def remembered(name):
    """The first check of this name that is remembered, by format: an op's, for rows in groups."""
    return lambda format: next(check for check in MADE if check.__name__ == name)


def remembered_wgrad(name):
    """The one of data by rows, or of transposed data."""

    def find(format):
        by_rows, transposed = [check for check in MADE if check.__name__ == name][:2]
        return transposed if FORMATS[format].transposed_columnwise else by_rows

    return find


# What is remembered by format, the arguments, and those whose sizes follow from T and nothing else tells.
CASES = {
    "group_quantize": (remembered("group_quantize"), quantize, ()),
    "group_quantize.out": (remembered("group_quantize_out"), quantize_out, range(8, 15)),
    "grouped_activation_quantize": (remembered("grouped_activation_quantize"), activation_quantize, ()),
    "group_dequantize": (remembered("group_dequantize"), dequantize, (1,)),
    "group_requantize": (remembered("group_requantize"), requantize, (1,)),
    "grouped_gemm_scaled": (remembered("grouped_gemm_scaled"), gemm, (1,)),
    "grouped_gemm_scaled.out": (remembered("grouped_gemm_scaled_out"), gemm_out, (1,)),
    "grouped_gemm_scaled_activation_quantize": (
        remembered("grouped_gemm_scaled_activation_quantize"),
        gemm_activation_quantize,
        (1,),
    ),
    "grouped_gemm_scaled_wgrad": (remembered_wgrad("grouped_gemm_scaled_wgrad"), wgrad, (1, 3)),
    "grouped_gemm_scaled_wgrad.out": (remembered_wgrad("grouped_gemm_scaled_wgrad_out"), wgrad_out, (1, 3)),
    "grouped_gemm_scaled_wgrad_accumulate_": (
        remembered_wgrad("grouped_gemm_scaled_wgrad_accumulate_"),
        wgrad_accumulate,
        (1, 3),
    ),
}
CELLS = [(name, format, layout) for name in CASES for format, layout in LAYOUTS]


def plain(result):
    """A check's result as something to compare."""
    if isinstance(result, SizedComponents):
        return result.specs()
    return tuple(map(plain, result)) if type(result) is tuple else result


def outcome(check, args, options):
    try:
        return plain(check(*args, **options))
    except (TypeError, ValueError) as error:
        return str(error)


def counting(once):
    """The rule remembered anew, and the checks that are made."""
    calls = []

    @functools.wraps(once.__wrapped__)
    def check(*args, **options):
        calls.append(1)
        return once.__wrapped__(*args, **options)

    anew = remembering(check, once.kinds, once.moves)
    anew.__wrapped__ = once.__wrapped__
    return anew, calls


@pytest.mark.parametrize("name, format, layout", CELLS)
def test_another_number_of_rows_is_not_checked_again(name, format, layout):
    find, arguments, _ = CASES[name]
    once, calls = counting(find(format))
    for rows in ROWS:
        args, options = arguments(format, layout, rows)
        assert plain(once(*args, **options)) == plain(once.__wrapped__(*args, **options))
        assert len(calls) == 1, rows
    for rows in FEW:
        args, options = arguments(format, layout, rows)
        assert outcome(once, args, options) == outcome(once.__wrapped__, args, options)


@pytest.mark.parametrize("name, format, layout", [cell for cell in CELLS if CASES[cell[0]][2]])
def test_other_sizes_are_refused_with_the_rows_that_they_do_not_fit(name, format, layout):
    find, arguments, places = CASES[name]
    once, _ = counting(find(format))
    for rows in ROWS:
        args, options = arguments(format, layout, rows)
        once(*args, **options)
        for place in places:
            t = args[place]
            for wrong in (t.new_empty(t.shape[0] + 1, *t.shape[1:]), t.new_empty(*t.shape, 1), t.new_empty(())):
                changed = (*args[:place], wrong, *args[place + 1 :])
                refused = outcome(once, changed, options)
                assert refused == outcome(once.__wrapped__, changed, options)
                assert isinstance(refused, str)
                assert "must be" in refused


@pytest.mark.parametrize("format", [f.name for f in FORMATS.values() if f.transposed_columnwise])
def test_transposed_data_of_no_number_of_rows_is_refused(format):
    once, _ = counting(CASES["grouped_gemm_scaled_wgrad"][0](format))
    args, options = wgrad(format, "compact", 500)
    once(*args, **options)
    form = FORMATS[format]
    for places in (form.unit_data * (G + 2) + form.per_byte, form.unit_data * (G - 2)):
        a, b = (t.new_empty(t.shape[0], places // form.per_byte) for t in (args[0], args[2]))
        changed = (a, args[1], b, *args[3:])
        refused = outcome(once, changed, options)
        assert refused == outcome(once.__wrapped__, changed, options)
        assert "Tp" in refused


def test_scales_that_lie_otherwise_are_checked_and_pass():
    """FP8 GEMMs read scales by rows too, which are not as ``group_quantize`` makes them."""
    once, calls = counting(remembered("grouped_gemm_scaled")("fp8_block"))
    for count, rows in enumerate((256, 300, 77), 1):
        args, options = gemm("fp8_block", "compact", rows)
        changed = (args[0], args[1].contiguous(), *args[2:])
        assert once(*changed, **options) == once.__wrapped__(*changed, **options)
        assert len(calls) == count


def test_columnwise_data_by_rows():
    once, calls = counting(remembered("group_dequantize")("mxfp8"))
    for rows in ROWS:
        args, options = dequantize("mxfp8", "blocked", rows, columnwise=True)
        assert once(*args, **options).shape == (rows, K)
        assert len(calls) == 1


def test_results_of_alternating_numbers_of_rows():
    """Results of calls that alternate between two numbers of rows, against a first call of each."""
    x, offs = torch.randn(90, 64), torch.tensor([20, 40], dtype=torch.int32)
    for format, layout in LAYOUTS:
        seen = {}
        for rows in (50, 90, 50, 90):
            made = tgl.group_quantize(x[:rows], offs, format=format, scale_layout=layout)
            amax = made.amax if FORMATS[format].decodes_with_amax else None
            back = tgl.group_dequantize(made.data, made.scale, offs, amax, format=format, scale_layout=layout)
            sizes = [math.prod(t.shape) for t in made]
            assert back.shape == (rows, 64)
            first = seen.setdefault(rows, (sizes, back))
            assert first[0] == sizes
            assert torch.equal(first[1], back)
