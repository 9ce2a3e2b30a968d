"""The simplifier of graphs, against the rules of TVM Relax's ``Gradient`` simplifier, and where it goes beyond them."""
from __future__ import annotations

import copy
import operator
import random
import threading
import warnings

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from tests.helpers import in_threads
from tests.slow import few, slow
from torchckpt.errors import ArgumentError
from torchckpt.graph.derive.simplify import simplify

aten = torch.ops.aten
SWAPS = (aten.t.default, aten.mT.default, aten.transpose.int, aten.permute.default)
PRODUCTS = (aten.mm.default, aten.bmm.default, aten.matmul.default, aten.addmm.default, aten.baddbmm.default)


# graphs ---------------------------------------------------------------------------------------------------------------


def real(*shape, dtype=torch.float32):
    return torch.randn(shape, dtype=dtype, requires_grad=True)


def traced(function, *inputs):
    return make_fx(function, tracing_mode="fake")(*(tensor.detach() for tensor in inputs))


def joint(function, *inputs):
    """The joint graph of ``function``, and inputs for it: those given, and some gradients."""
    from functorch.compile import aot_function, default_partition

    graphs = []

    def part(module, arguments, **options):
        graphs.append((module, arguments))
        return default_partition(module, arguments, **options)

    def as_it_is(module, _):
        return module

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        aot_function(function, fw_compiler=as_it_is, bw_compiler=as_it_is, partition_fn=part)(*inputs)
    (module, (_, tangents)), = graphs
    return module, [*inputs, *(torch.randn(tuple(tangent.shape), dtype=tangent.dtype) for tangent in tangents)]


def by_hand(body, *inputs):
    """A graph of exactly the operators that ``body(call, *nodes)`` calls; tracing would take composite ones apart."""
    mode = traced(lambda x: x + 1, inputs[0]).graph.find_nodes(op="placeholder")[0].meta["val"].fake_mode
    graph = fx.Graph()

    def call(target, *args, **kwargs):
        node = graph.call_function(target, args, kwargs)
        with mode:
            node.meta["val"] = target(*fx.node.map_arg(args, lambda n: n.meta["val"]), **kwargs)
        return node

    nodes = [graph.placeholder(name) for name, _ in zip("abcdef", inputs)]
    for node, tensor in zip(nodes, inputs):
        node.meta["val"] = mode.from_tensor(tensor.detach())
    graph.output(body(call, *nodes))
    return fx.GraphModule({}, graph)


def picture(module):
    """The operations in their order; inputs are a, b, c and so on; the last line is what is returned."""
    names, lines = {}, []
    for node in module.graph.nodes:
        arguments = fx.node.map_arg(node.args, lambda n: Name(names[n]))
        if node.op == "placeholder":
            names[node] = "abcdefgh"[len(names)]
        elif node.op == "output":
            lines.append(str(arguments[0]).strip("[]()").rstrip(","))
        else:
            names[node] = f"v{len(lines) + 1}"
            lines.append(f"{names[node]} = {node.target.__name__.split('.')[0]}({str(list(arguments))[1:-1]})")
    return lines


class Name(str):
    __repr__ = str.__str__


def count(module, targets):
    return sum(node.target in targets for node in module.graph.nodes)


def transposes(module):
    return count(module, SWAPS)


def products(module):
    return count(module, PRODUCTS)


class Checked(fx.Interpreter):
    """Runs a graph and compares each tensor with ``meta["val"]``: size, type, strides, offset, who shares a storage."""

    def run(self, *inputs):
        self.real, self.told = {}, {}
        result = super().run(*inputs, enable_io_processing=False)
        assert [*self.real.values()] == [*self.told.values()]
        return pytree.tree_leaves(result)

    def run_node(self, n):
        value = super().run_node(n)
        if n.op != "output":
            for place, (tensor, told) in enumerate(zip(leaves(value), leaves(n.meta["val"]))):
                assert facts(tensor) == facts(told), n
                self.note(self.real, tensor, (n.name, place))
                self.note(self.told, told, (n.name, place))
        return value

    def note(self, storages, tensor, name):
        storages.setdefault(tensor.untyped_storage(), []).append(name)


def leaves(value):
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def facts(tensor):
    """All but the strides of dimensions of 1, where fake views differ from real ones."""
    strides = tuple(stride for stride, size in zip(tensor.stride(), tensor.shape) if size != 1)
    return tuple(tensor.shape), tensor.dtype, strides, tensor.storage_offset()


def run(module, *inputs):
    return Checked(module).run(*(tensor.detach() for tensor in inputs))


def assert_simplified(module, inputs, exact=False):
    """The whole contract on one graph; returns the simplified one."""
    before = picture(module) if len(inputs) <= 8 else None
    simplified = simplify(module, exact=exact)
    assert before is None or picture(module) == before
    simplified.graph.lint()
    for received, expected in zip(run(simplified, *inputs), run(module, *inputs), strict=True):
        if exact:
            assert facts(received) == facts(expected)
            assert torch.equal(received, expected)
        else:
            torch.testing.assert_close(received, expected)
    assert transposes(simplified) <= transposes(module)
    assert products(simplified) <= products(module)
    assert names(simplify(simplified, exact=exact)) == names(simplified)
    return simplified


def names(module):
    return [node.name for node in module.graph.nodes]


# T(T(a)) -> a ---------------------------------------------------------------------------------------------------------

FORMS = {
    "t": (lambda x: aten.t(x), (2, 3)),
    "transpose": (lambda x: aten.transpose(x, 0, 1), (2, 3)),
    "permute": (lambda x: aten.permute(x, [1, 0]), (2, 3)),
    "transpose(-1, -2)": (lambda x: aten.transpose(x, -1, -2), (2, 3, 4)),
    "transpose(1, -1)": (lambda x: aten.transpose(x, 1, -1), (2, 3, 4)),
    "permute(0, 2, 1)": (lambda x: aten.permute(x, [0, 2, 1]), (2, 3, 4)),
    "permute(0, 1, -1, -2)": (lambda x: aten.permute(x, [0, 1, -1, -2]), (2, 3, 4, 5)),
}


@few(16)
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("first", FORMS)
@pytest.mark.parametrize("second", FORMS)
def test_transpose_of_a_transpose_is_what_it_was(first, second, exact):
    (swap, shape), (back, other) = FORMS[first], FORMS[second]
    if len(shape) != len(other):
        return
    inputs = [real(*shape)]
    simplified = assert_simplified(traced(lambda x: back(swap(x)).sin(), *inputs), inputs, exact)
    assert picture(simplified) == ["v1 = sin(a)", "v1"]


def test_mT_is_a_transpose():
    inputs = [real(2, 3, 4)]
    module = by_hand(lambda call, a: call(aten.transpose.int, call(aten.mT.default, a), 1, 2), *inputs)
    assert picture(assert_simplified(module, inputs)) == ["a"]


REWRITES = {
    "three transposes are one": (lambda x: x.t().t().t(), [(2, 3)], ["v1 = t(a)", "v1"]),
    "a transpose with other readers stays for them": (
        lambda x: (x.t(), x.t().t().cos(), x.t().sin()), [(2, 3)],
        ["v1 = t(a)", "v2 = cos(a)", "v3 = sin(v1)", "v1, v2, v3"],
    ),
    "a transpose made twice is made once": (
        lambda x: (x.t().sin(), x.mT.cos()), [(2, 3)], ["v1 = t(a)", "v2 = sin(v1)", "v3 = cos(v1)", "v2, v3"],
    ),
    "a view of the batch between two": (
        lambda x: aten.view(x.mT, [2, 3, 4, 3]).mT, [(6, 3, 4)], ["v1 = view(a, [2, 3, 3, 4])", "v1"],
    ),
    "an expansion of the batch between two": (
        lambda x: aten.expand(x.mT, [2, 4, 3]).mT, [(3, 4)], ["v1 = expand(a, [2, 3, 4])", "v1"],
    ),
    "a view that changes nothing is dropped": (
        lambda x: aten.view(aten.expand(x, [2, 3]), [2, 3]).sin(), [(2, 3)], ["v1 = sin(a)", "v1"],
    ),
}


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(("function", "shapes", "expected"), REWRITES.values(), ids=REWRITES)
def test_transposes_are_cancelled(function, shapes, expected, exact):
    inputs = [real(*shape) for shape in shapes]
    assert picture(assert_simplified(traced(function, *inputs), inputs, exact)) == expected


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda x: x.transpose(0, 1).transpose(0, 1), (2, 3, 4)),
        (lambda x: x.transpose(0, 2).transpose(0, 2), (2, 3, 4)),
        (lambda x: x.permute(1, 0, 2).permute(1, 0, 2), (2, 3, 4)),
        (lambda x: x.permute(2, 0, 1).permute(1, 2, 0), (2, 3, 4)),
        (lambda x: aten.transpose(aten.transpose(x, 1, 1), 1, 1), (2, 3)),
        (lambda x: aten.t(aten.t(x)), (3,)),
        (lambda x: aten.permute(aten.permute(x, [0]), [0]), (3,)),
        (lambda x: aten.view(x.t(), [2, 3, 4]).mT, (4, 6)),
    ],
    ids=["first two", "outer two", "permute", "cycle", "none", "a vector", "permute of a vector", "a view of rows"],
)
def test_any_other_swap_stays(function, shape):
    inputs = [real(*shape)]
    module = traced(function, *inputs)
    assert picture(assert_simplified(module, inputs)) == picture(module)


@pytest.mark.parametrize(
    "function", [lambda x: x.mH.mH, lambda x: x.adjoint().mT, lambda x, y: x.mT.mH @ y, lambda x, y: (x.mH @ y).mH],
    ids=["mH", "adjoint", "mT then mH", "product"],
)
def test_conjugate_transpose_is_no_transpose(function):
    inputs = [real(3, 3, dtype=torch.complex64) for _ in range(function.__code__.co_argcount)]
    for received, expected in zip(run(simplify(traced(function, *inputs)), *inputs), [function(*inputs)], strict=True):
        torch.testing.assert_close(received, expected.detach())
    if len(inputs) == 1:
        by_call = by_hand(lambda call, a: call(aten.adjoint.default, call(aten.adjoint.default, a)), *inputs)
        assert len(picture(simplify(by_call))) == 3


# T(a @ b) -> T(b) @ T(a) ----------------------------------------------------------------------------------------------


SQUARE = (4, 4)
PRODUCTS_TURNED = {
    "a'b'": (lambda a, b: (a.t() @ b.t()).t(), [SQUARE] * 2, ["v1 = mm(b, a)", "v1"]),
    "a'b": (lambda a, b: (a.t() @ b).t(), [SQUARE] * 2, ["v1 = t(b)", "v2 = mm(v1, a)", "v2"]),
    "ab'": (lambda a, b: (a @ b.t()).t(), [SQUARE] * 2, ["v1 = t(a)", "v2 = mm(b, v1)", "v2"]),
    "ab": (lambda a, b: (a @ b).t(), [SQUARE] * 2, ["v1 = mm(a, b)", "v2 = t(v1)", "v2"]),
    "ab''": (
        lambda a, b: (a @ b.t().t()).t().sin(), [SQUARE] * 2, ["v1 = mm(a, b)", "v2 = t(v1)", "v3 = sin(v2)", "v3"],
    ),
    "batched, through views of the batch": (
        lambda a, b: (a.mT @ b.mT).mT, [(2, 3, 4, 5), (2, 3, 6, 4)],
        ["v1 = view(a, [6, 4, 5])", "v2 = view(b, [6, 6, 4])", "v3 = bmm(v2, v1)",
         "v4 = _unsafe_view(v3, [2, 3, 6, 5])", "v4"],
    ),
    "a broadcast factor": (
        lambda a, b: torch.bmm(a.mT, b.t().expand(2, 4, 5)).mT, [(2, 4, 3), (5, 4)],
        ["v1 = expand(b, [2, 5, 4])", "v2 = bmm(v1, a)", "v2"],
    ),
    "a batched addend": (
        lambda c, a, b: torch.baddbmm(c, a.mT, b.mT).mT, [(2, 3, 5), (2, 4, 3), (2, 5, 4)],
        ["v1 = transpose(a, -2, -1)", "v2 = baddbmm(v1, c, b)", "v2"],
    ),
    "a product of products, if that takes fewer transposes": (
        lambda a, b, c: ((a.t() @ b.t()) @ c).t(), [SQUARE] * 3,
        ["v1 = mm(b, a)", "v2 = t(c)", "v3 = mm(v2, v1)", "v3"],
    ),
    "a square of a product, once": (
        lambda a, b: ((product := a.t() @ b.t()) @ product).t(), [SQUARE] * 2,
        ["v1 = mm(b, a)", "v2 = mm(v1, v1)", "v2"],
    ),
    "a transpose that is there is read again": (
        lambda a, b: (a.t().sin(), b.t().sin(), (a @ b).t()), [SQUARE] * 2,
        ["v1 = t(a)", "v2 = sin(v1)", "v3 = t(b)", "v4 = sin(v3)", "v5 = mm(v3, v1)", "v2, v4, v5"],
    ),
}


@pytest.mark.parametrize(("function", "shapes", "expected"), PRODUCTS_TURNED.values(), ids=PRODUCTS_TURNED)
def test_transpose_of_a_product_of_transposes(function, shapes, expected):
    inputs = [real(*shape) for shape in shapes]
    assert picture(assert_simplified(traced(function, *inputs), inputs)) == expected


@pytest.mark.parametrize(
    ("function", "shapes", "exact"),
    [
        (lambda a, b: (a.t() @ b.t()).t(), [SQUARE] * 2, True),
        (lambda c, a, b: torch.addmm(c, a.t(), b.t()).t(), [(5,), (4, 3), (5, 4)], False),
        (lambda a, b: ((product := a.t() @ b.t()).t(), product.sin()), [SQUARE] * 2, False),
        (lambda a, b: ((product := a.t() @ b.t()).t(), product), [SQUARE] * 2, False),
    ],
    ids=["exact", "an addend without rows", "two readers", "an output too"],
)
def test_products_that_stay_as_they_are(function, shapes, exact):
    inputs = [real(*shape) for shape in shapes]
    module = traced(function, *inputs)
    assert picture(assert_simplified(module, inputs, exact)) == picture(module)


def test_matmul_that_broadcasts_is_turned():
    inputs = [real(4, 3), real(2, 5, 4)]

    def body(call, a, b):
        turned = [call(aten.mT.default, x) for x in (a, b)]
        return call(aten.mT.default, call(aten.matmul.default, *turned))

    assert picture(assert_simplified(by_hand(body, *inputs), inputs)) == ["v1 = matmul(b, a)", "v1"]


@pytest.mark.parametrize("shapes", [((3,), (2, 4, 3)), ((2, 4, 3), (4,))], ids=["left", "right"])
def test_product_with_a_vector_is_not_turned(shapes):
    inputs = [real(*shape) for shape in shapes]

    def body(call, a, b):
        turned = [x if x.meta["val"].dim() == 1 else call(aten.mT.default, x) for x in (a, b)]
        return call(aten.mT.default, call(aten.matmul.default, *turned))

    module = by_hand(body, *inputs)
    assert picture(simplify(module)) == picture(module)
    assert len(run(module, *inputs)) == 1


def test_addend_with_rows_is_turned_and_its_factors_stay():
    inputs = [real(1, 5), real(4, 3), real(5, 4)]

    def function(c, a, b):
        return torch.addmm(c, a.t(), b.t(), beta=2, alpha=3).t()

    module = traced(function, *inputs)
    simplified = assert_simplified(module, inputs)
    assert picture(simplified) == ["v1 = t(a)", "v2 = addmm(v1, c, b)", "v2"]
    sums = simplified.graph.find_nodes(op="call_function", target=aten.addmm.default)
    assert [node.kwargs for node in sums] == [{"beta": 2, "alpha": 3}]


def test_type_of_the_result_is_kept():
    inputs = [real(4, 3, dtype=torch.bfloat16), real(5, 4, dtype=torch.bfloat16)]

    def body(call, a, b):
        turned = [call(aten.t.default, x) for x in (a, b)]
        return call(aten.t.default, call(aten.mm.dtype, *turned, torch.float32))

    simplified = simplify(by_hand(body, *inputs))
    assert picture(simplified) == ["v1 = mm(b, a, torch.float32)", "v1"]
    assert facts(list(simplified.graph.nodes)[-2].meta["val"]) == ((5, 3), torch.float32, (3, 1), 0)


# gradients ------------------------------------------------------------------------------------------------------------


def matrix(*names):
    """Shapes of ``A`` (3 by 4) and ``B`` (4 by 5), of transposed ones the other way round."""
    return [{"A": (3, 4), "A'": (4, 3), "B": (4, 5), "B'": (5, 4)}[name] for name in names]


GRADIENTS = [
    # what is multiplied; then with G the gradient that arrives, dA and dB as Relax expects them
    ("A", "B", "GB'", "A'G"),
    ("A", "B'", "GB", "G'A"),
    ("A'", "B", "BG'", "AG"),
    ("A'", "B'", "B'G'", "G'A'"),
]


@few(1)
@pytest.mark.parametrize("batch", [(), (2,), (2, 3)], ids=["mm", "bmm", "bmm of two batch dimensions"])
@pytest.mark.parametrize(("a", "b", "da", "db"), GRADIENTS, ids=["AB", "AB'", "A'B", "A'B'"])
def test_gradients_of_a_product_as_relax_has_them(a, b, da, db, batch):
    inputs = [real(*batch, *shape) for shape in matrix(a, b)]

    def function(x, y):
        return (x.mT if "'" in a else x) @ (y.mT if "'" in b else y)

    module, arguments = joint(function, *inputs)
    simplified = assert_simplified(module, arguments)
    assert [formula(node) for node in simplified.graph.output_node().args[0][1:]] == [da, db]
    assert all(node.meta["val"].is_contiguous() for node in simplified.graph.output_node().args[0])


def formula(node):
    """``node`` as a product of A, B and G, all views of the batch left out."""
    if node.op == "placeholder":
        return {"primals_1": "A", "primals_2": "B", "tangents_1": "G"}[node.name]
    inner = [formula(argument) for argument in node.all_input_nodes]
    return inner[0] + "'" if node.target in SWAPS else "".join(inner)


@pytest.mark.parametrize("exact", [False, True])
def test_backward_of_linear_has_two_transposes_of_five(exact):
    module, inputs = joint(F.linear, real(4, 3, 8), real(16, 8), real(16))
    assert transposes(module) == 5
    simplified = assert_simplified(module, inputs, exact)
    assert [line.replace("_unsafe_view", "view") for line in picture(simplified)] == [  # as torch 2.15 traces it
        "v1 = view(a, [12, 8])",
        "v2 = t(b)",
        "v3 = addmm(c, v1, v2)",
        "v4 = view(v3, [4, 3, 16])",
        "v5 = view(d, [12, 16])",
        "v6 = mm(v5, b)",
        "v7 = t(v5)",
        "v8 = mm(v7, v1)",
        "v9 = sum(v5, [0], True)",
        "v10 = view(v9, [16])",
        "v11 = view(v6, [4, 3, 8])",
        "v4, v11, v8, v10",
    ]
    assert (transposes(simplified), products(simplified)) == (2, products(module))
    weight = simplified.graph.output_node().args[0][2]
    assert weight.meta["val"].stride() == (8, 1)


def attention(q, k, v):
    return torch.softmax(q @ k.transpose(-2, -1), -1) @ v


def test_gradients_of_attention_are_contiguous():
    module, inputs = joint(attention, *(real(2, 3, 4, 5) for _ in range(3)))
    strides = [[node.meta["val"].is_contiguous() for node in graph.graph.output_node().args[0]]
               for graph in (module, assert_simplified(module, inputs))]
    assert strides == [[True, True, False, True], [True] * 4]


class Block(nn.Module):
    def __init__(self, width=8, heads=2):
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.into(self.norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        mixed = attention(*parts.permute(2, 0, 3, 1, 4))
        return x + F.gelu(self.out(mixed.transpose(1, 2).reshape(batch, length, width)))


@few(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exact_is_bit_equal_on_a_transformer_block(dtype):
    block = Block().to(dtype)
    parameters = dict(block.named_parameters())

    def function(x, *values):
        return torch.func.functional_call(block, dict(zip(parameters, values)), (x,))

    module, inputs = joint(function, real(2, 16, 8, dtype=dtype), *parameters.values())
    exact, full = (assert_simplified(module, inputs, exact=exact) for exact in (True, False))
    assert transposes(full) < transposes(exact) < transposes(module)


# strides, and what hangs on them --------------------------------------------------------------------------------------


def turned_then(function):
    return lambda a, b: function((a.t() @ b.t()).t())


def test_strides_and_storages_are_right_behind_a_turned_product():
    inputs = [real(4, 6), real(8, 4)]
    module = traced(turned_then(lambda x: (x * 2, x.view(2, 4, 6).sin(), x[1:].unbind(1)[0], x.exp().t())), *inputs)
    assert transposes(assert_simplified(module, inputs)) == transposes(module) - 3


def test_views_of_a_turned_product_share_its_storage_even_if_their_strides_are_the_same():
    inputs = [real(4, 1), real(8, 4)]
    module = traced(turned_then(lambda x: aten.view(x, [8])), *inputs)
    assert picture(assert_simplified(module, inputs)) == ["v1 = mm(b, a)", "v2 = view(v1, [8])", "v2"]


def test_output_of_several_tensors_follows_the_new_strides():
    inputs = [real(4, 6), real(8, 4)]
    module = traced(turned_then(lambda x: aten.native_layer_norm(x.t(), [8], None, None, 1e-5)), *inputs)
    assert_simplified(module, inputs)
    module = traced(turned_then(lambda x: [part.sin() for part in aten.split(x, 2)]), *inputs)
    assert count(assert_simplified(module, inputs), [operator.getitem]) == 4


@torch.library.custom_op("torchckpt_test::reads_its_memory", mutates_args=())
def reads_its_memory(x: Tensor) -> Tensor:
    return x.clone()


@reads_its_memory.register_fake
def _(x):
    return torch.empty_like(x)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: aten.as_strided(x, [2, 2], [1, 3], 1),
        lambda x: aten.as_strided(x * 2, [2, 2], [1, 3], 1),
        lambda x: aten.bernoulli(x.sigmoid()),
        lambda x: aten.rand_like(x),
        lambda x: reads_its_memory(x),
        lambda x: aten.view((x + 1).unsqueeze(0).permute(2, 0, 1), [-1]),
        lambda x: aten.view((x + 1).expand(2, 8, 6).permute(0, 2, 1), [2, -1]),
    ],
    ids=["as_strided", "as_strided further on", "random", "random like", "another's operator", "view", "batched view"],
)
def test_product_stays_where_strides_matter(function):
    inputs = [real(4, 6), real(8, 4)]
    module = traced(turned_then(function), *inputs)
    assert picture(simplify(module)) == picture(module)


def test_product_turns_where_strides_end_before_they_matter():
    inputs = [real(4, 6), real(8, 4)]
    module = traced(turned_then(lambda x: aten.as_strided(x.sum(0), [2, 2], [1, 3], 0)), *inputs)
    assert picture(assert_simplified(module, inputs))[0] == "v1 = mm(b, a)"


def test_sizes_may_be_symbols():
    inputs = [real(2, 3, 4, 5).detach(), real(2, 3, 6, 4).detach()]

    def function(a, b):
        return aten.expand((a.mT @ b.mT).mT.relu(), [*a.shape[:2], -1, -1])

    module = make_fx(function, tracing_mode="symbolic")(*inputs)
    simplified = simplify(module)
    assert (transposes(module), transposes(simplified)) == (3, 0)
    torch.testing.assert_close(simplified(*inputs), module(*inputs))


# the module -----------------------------------------------------------------------------------------------------------


def test_original_is_untouched():
    module, _ = joint(attention, *(real(2, 3, 4, 5) for _ in range(3)))
    before = [(node.name, node.args, node.meta.get("val"), dict(node.meta)) for node in module.graph.nodes]
    simplified = simplify(module)
    assert simplified is not module
    for node, (name, args, value, meta) in zip(module.graph.nodes, before, strict=True):
        assert (node.name, node.args) == (name, args)
        assert node.meta.get("val") is value
        assert node.meta.keys() == meta.keys()


def test_turned_product_is_known_as_what_it_stands_for():
    module, _ = joint(attention, *(real(2, 3, 4, 5) for _ in range(3)))
    new = [node for node in simplify(module).graph.nodes if "default" in node.name and node.target is aten.bmm.default]
    assert [node.meta["partitioner_tag"] for node in new] == ["is_backward"]
    assert all("tensor_meta" not in node.meta and "seq_nr" in node.meta for node in new)


def test_dead_code_goes_and_effects_stay():
    inputs = [real(2, 3), real(2, 3)]

    def function(a, b):
        b.sin()
        a.copy_(b)
        return b.cos()

    simplified = simplify(traced(function, *inputs))
    assert picture(simplified) == ["v1 = copy_(a, b)", "v2 = cos(b)", "v2"]


def test_parameters_of_the_module_are_kept():
    linear = nn.Linear(3, 4).requires_grad_(False)
    module = make_fx(lambda x: linear(x).t().t(), tracing_mode="fake", _allow_non_fake_inputs=True)(torch.ones(2, 3))
    expected = module(torch.ones(2, 3))
    simplified = simplify(module)
    assert torch.equal(simplified(torch.ones(2, 3)), expected)
    assert transposes(simplified) == 1


def test_product_with_a_parameter_of_the_module_is_turned():
    weight = nn.Parameter(torch.randn(5, 4), requires_grad=False)
    module = make_fx(lambda x: (x.t() @ weight.t()).t(), tracing_mode="fake", _allow_non_fake_inputs=True)(real(4, 3))
    simplified = simplify(module)
    torch.testing.assert_close(simplified(torch.ones(4, 3)), module(torch.ones(4, 3)))
    assert transposes(simplified) == 0


def test_graph_without_operations_is_copied():
    module = fx.symbolic_trace(lambda x: x)
    assert names(simplify(module)) == names(module)


def test_graph_without_fake_tensors_is_refused():
    with pytest.raises(ArgumentError, match=r"(?s)of one mode\n  received: fake tensors of 0 modes.*make_fx"):
        simplify(fx.symbolic_trace(lambda x: x.t() + torch.t(x)))


# any graph ------------------------------------------------------------------------------------------------------------


def random_function(seed, batch):
    """Of three square matrices: a dozen transposes, products, sums and views of each other; some are outputs."""

    def function(*inputs):
        choose, values = random.Random(seed), list(inputs)
        for _ in range(12):
            a, b = (choose.choice(values[-5:]) for _ in range(2))
            values.append(choose.choice([
                lambda a=a: a.mT,
                lambda a=a: a.mT,
                lambda a=a: aten.permute(a, [*range(a.dim() - 2), -1, -2]),
                lambda a=a, b=b: a @ b,
                lambda a=a, b=b: a @ b,
                lambda a=a, b=b: a.mT @ b.mT,
                lambda a=a, b=b: (a + b) / 2,
                lambda a=a: aten.view(a.contiguous(), a.shape),
            ])())
        return [values[-1], *choose.sample(values, 2)]

    return function, [real(*batch, 3, 3, dtype=torch.float64) / 2 for _ in range(3)]


@few(1)
@pytest.mark.parametrize("batch", [(), (2, 2), (1,), *slow([(2,), (1, 2)])], ids=str)
def test_any_graph_keeps_its_values_and_loses_transposes(batch):
    torch.manual_seed(0)
    lost = 0
    for seed in range(10):
        function, inputs = random_function(seed, batch)
        module = traced(function, *inputs)
        for exact in (True, False):
            lost += transposes(module) - transposes(assert_simplified(module, inputs, exact))
    assert lost > 30


def test_threads_leave_the_filters_of_warnings_as_they_were(monkeypatch):
    """They are of the process: one put back what another had set."""
    module, before, deepcopy = traced(torch.sin, real(3)), list(warnings.filters), copy.deepcopy
    copying, has_ended = [threading.Event(), threading.Event()], threading.Event()

    def slow(graph):
        number = int(copying[0].is_set())
        copying[number].set()
        (has_ended if number else copying[1]).wait(0.3)
        return deepcopy(graph)

    def first():
        simplify(module)
        has_ended.set()

    def second():
        copying[0].wait(30)
        simplify(module)

    monkeypatch.setattr(copy, "deepcopy", slow)
    in_threads(first, second)
    assert list(warnings.filters) == before
