"""The packed matrix product: its values, and that a row's bits depend neither on the other rows nor on the threads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from native_kernels import DTYPES, INSTRUCTION_SETS, rounds

from worker.kernels import native
from worker.models.model_card import dtype_name

ROWS, ONE, NAN = 512, torch.ones(1, 1), float("nan")
# outputs, inputs, gated: the weights of the demo model (a slice of the last), and sizes at the edges of panels
DEMO = [(960, 576, False), (576, 576, False), (3072, 576, True), (576, 1536, False), (2001, 576, False)]
ODD = [(1, 1, False), (15, 7, False), (17, 49, False), (33, 8, False), (16, 8, True), (48, 33, True), (80, 64, True)]
EDGES = (1, 2, 3, 4, 5, 6, 7, 12, 13, 31, 32, 33, 34, 47, 48, 49, 64)

pytestmark = pytest.mark.skipif(native.module() is None, reason="the native kernels are not built in")


@dataclass
class Product:
    """A random weight in `dtype`, and rows that bfloat16 holds exactly, so that only arithmetic makes errors."""

    outputs: int
    inputs: int
    gated: bool
    dtype: torch.dtype
    instruction_set: str
    biased: bool = False

    def __post_init__(self) -> None:
        torch.set_num_threads(1)
        generator = torch.Generator().manual_seed(self.outputs)
        self.weight = (torch.randn(self.outputs, self.inputs, generator=generator) * self.inputs**-0.5).to(self.dtype)
        self.bias = torch.randn(self.outputs, generator=generator).to(self.dtype) if self.biased else None
        self.x = torch.randn(ROWS, self.inputs, generator=generator).bfloat16().float()

    def matrix(self, threads: int) -> Any:
        pool = native.thread_pool(threads)
        return native.module().Matrix(
            pool, self.instruction_set, dtype_name(self.dtype), self.weight, self.bias, self.gated
        )

    @property
    def columns(self) -> int:
        return self.outputs // 2 if self.gated else self.outputs

    def multiply(self, matrix: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.full((len(x), self.columns), NAN)
        matrix.multiply(x, y)
        return y

    def exact(self) -> torch.Tensor:
        bias = 0.0 if self.bias is None else self.bias.double()
        y = self.x.double() @ self.weight.double().T + bias
        if not self.gated:
            return y
        gate, up = y.chunk(2, dim=1)
        return torch.nn.functional.silu(gate) * up

    def rows_that_differ(self, threads: int, counts: Iterable[int]) -> list[int]:
        """The row counts with which some row has other bits than among 512 rows on one thread."""
        whole, matrix, found = self.multiply(self.matrix(1), self.x), self.matrix(threads), []
        for count in counts:
            first = 37 * count % (ROWS - count)
            if not torch.equal(self.multiply(matrix, self.x[first : first + count]), whole[first : first + count]):
                found.append(count)
        return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize(("outputs", "inputs", "gated"), DEMO)
def test_a_row_does_not_depend_on_the_other_rows(
    outputs: int, inputs: int, gated: bool, instruction_set: str, dtype: torch.dtype
) -> None:
    product = Product(outputs, inputs, gated, dtype, instruction_set)
    slow = instruction_set == "scalar"
    assert product.rows_that_differ(1, EDGES[::2] if slow else range(1, 65)) == []
    assert product.rows_that_differ(2, EDGES[1::4] if slow else EDGES) == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_nor_with_a_bias_or_where_panels_are_cut(instruction_set: str, dtype: torch.dtype) -> None:
    for outputs, inputs, gated in ODD:
        for biased in (False, True):
            product = Product(outputs, inputs, gated, dtype, instruction_set, biased)
            for threads in (1, 2, 3):
                assert product.rows_that_differ(threads, EDGES) == [], (outputs, inputs, threads)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("biased", [False, True])
def test_values(biased: bool, instruction_set: str, dtype: torch.dtype) -> None:
    for outputs, inputs, gated in (*DEMO[2:4], *ODD):
        product = Product(outputs, inputs, gated, dtype, instruction_set, biased)
        tolerance = 1e-2 if gated and rounds(instruction_set, dtype) else 1e-5
        for rows in (ROWS, 3):
            made = product.multiply(product.matrix(2), product.x[:rows])
            torch.testing.assert_close(made.double(), product.exact()[:rows], atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stored", DTYPES)
def test_weights_are_converted_as_torch_does(stored: torch.dtype, dtype: torch.dtype) -> None:
    edges = [0.0, 1e-7, 6e-8, 2.9e-8, -3e-6, 6.1e-5, 65504.0, 65519.0, 65520.0, 70000.0, -3e38, float("inf"), NAN]
    ties = [1.00390625, 1.01171875, -1.00390625, 1.00048828125, 1.00146484375]  # between two numbers of half precision
    values = torch.cat((torch.tensor(edges + ties), torch.randn(200, generator=torch.Generator().manual_seed(1))))
    weight, y = values.to(stored)[:, None], torch.empty(1, len(values))  # one input, so an output is one weight
    for instruction_set in INSTRUCTION_SETS:
        native.module().Matrix(native.thread_pool(1), instruction_set, dtype_name(dtype), weight).multiply(ONE, y)
        wanted = weight[:, 0].float().to(dtype).float()
        torch.testing.assert_close(y[0], wanted, atol=0, rtol=0, equal_nan=True)


def test_adding_keeps_what_is_there() -> None:
    product = Product(50, 24, False, torch.float32, "", biased=True)
    y = torch.ones(7, 50)
    product.matrix(2).multiply(product.x[:7], y, True)
    torch.testing.assert_close(y, product.multiply(product.matrix(1), product.x[:7]) + 1)


def test_shapes_that_do_not_fit_are_refused() -> None:
    module, pool, weight = native.module(), native.thread_pool(1), torch.zeros(20, 12)
    matrix = module.Matrix(pool, "", "float32", weight)
    for x, y in (((2, 11), (2, 20)), ((2, 12), (2, 19)), ((2, 12), (3, 20))):
        with pytest.raises(ValueError, match="shapes"):
            matrix.multiply(torch.zeros(x), torch.zeros(y))
    with pytest.raises(ValueError, match="multiple of 8"):
        module.Matrix(pool, "", "float32", weight, None, True)
    with pytest.raises(ValueError, match="number of elements"):
        module.Matrix(pool, "", "float32", weight, torch.zeros(19))
    with pytest.raises(ValueError, match="two dimensions"):
        module.Matrix(pool, "", "float32", torch.zeros(20))
    with pytest.raises(ValueError, match="no kernels of that name"):
        module.Matrix(pool, "sse9", "float32", weight)
    for dtype in ("float64", "int8", ""):
        with pytest.raises(ValueError, match="dtype must be"):
            module.Matrix(pool, "", dtype, weight)
    with pytest.raises(TypeError, match="float32, float16 or bfloat16"):
        module.Matrix(pool, "", "float32", weight.double())
