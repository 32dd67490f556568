"""`Seq2Seq`: what it computes, its padding, its counts and that it learns."""

from __future__ import annotations

import copy

import pytest
import torch

import stiefel
from stiefel import errors
from stiefel.models import (
    ASRNN,
    GRU,
    LSTM,
    NNRNN,
    ConvNERU,
    OrthogonalRNN,
    Seq2Seq,
    masked_cross_entropy,
)
from stiefel.models.cells import CELLS
from tests.translation import (
    BEGIN,
    END,
    SOURCE_LENGTHS,
    TARGET_LENGTHS,
    made,
    sentences,
    slow_logits,
    written,
)


@pytest.mark.parametrize("cell", CELLS)
def test_the_formulas_sentence_by_sentence_with_gradients(cell, device):
    model = made(cell, num_layers=2).to(device)
    source, target = (tokens.to(device) for tokens in sentences())
    logits = model(source, target, SOURCE_LENGTHS, TARGET_LENGTHS)
    assert logits.shape == (5, 3, 7)
    alone = []
    for b, (S, T) in enumerate(zip(SOURCE_LENGTHS, TARGET_LENGTHS, strict=True)):
        alone.append(slow_logits(model, source[:S, b], target[:T, b]))
        assert (logits[:T, b] - alone[-1]).abs().max() < 1e-12
        assert not logits[T:, b].any()
    leaves = list(model.parameters())
    slopes = torch.autograd.grad(logits.sin().sum(), leaves)
    wanted = torch.autograd.grad(torch.cat(alone).sin().sum(), leaves)
    for a, b in zip(slopes, wanted, strict=True):
        assert (a - b).abs().max() < 1e-11 * max(1.0, b.abs().max().item())


@pytest.mark.parametrize("cell", ["orthogonal-rnn", "lstm"])
def test_padding_is_never_read(cell):
    model = made(cell)
    source, target = sentences()
    expected = model(source, target, SOURCE_LENGTHS, TARGET_LENGTHS)
    loss = model.loss(source, target, SOURCE_LENGTHS, TARGET_LENGTHS)
    assert torch.equal(model(source, target), expected)  # lengths from the padding token
    assert torch.equal(model.loss(source, target), loss)
    other, another = source.clone(), target.clone()
    for b, (S, T) in enumerate(zip(SOURCE_LENGTHS, TARGET_LENGTHS, strict=True)):
        other[S:, b], another[T:, b] = 10**6, -5  # no tokens at all
    assert torch.equal(model(other, another, SOURCE_LENGTHS, TARGET_LENGTHS), expected)
    assert torch.equal(model.loss(other, another, SOURCE_LENGTHS, TARGET_LENGTHS), loss)
    longer = torch.cat([source, torch.zeros(4, 3, dtype=torch.int64)])
    assert (model(longer, target) - expected).abs().max() < 1e-12


def test_the_loss_is_the_mean_over_the_real_tokens_of_all_sentences():
    model = made()
    source, target = sentences()
    terms = []
    for b, (S, T) in enumerate(zip(SOURCE_LENGTHS, TARGET_LENGTHS, strict=True)):
        logits = slow_logits(model, source[:S, b], target[: T - 1, b])
        terms.append(-logits.log_softmax(1).gather(1, target[1:T, b, None]))
    wanted = torch.cat(terms).mean()
    assert (model.loss(source, target, SOURCE_LENGTHS, TARGET_LENGTHS) - wanted).abs() < 1e-12


@pytest.mark.parametrize("cell", CELLS)
def test_the_state_of_the_decoder_is_used(cell):
    model = made(cell)
    with torch.no_grad():  # attention looks at nothing but the encoder
        model.attention.state.weight.zero_()
    source, target = sentences()
    other = target.clone()
    other[1] = (target[1] - 3 + 1) % 4 + 3
    with torch.no_grad():
        first, second = model(source, target), model(source, other)
    changed = (first - second).abs().amax(2)
    assert not changed[0].any()
    assert (changed[1] > 0).all()  # the token itself
    assert (changed[2][[b for b, T in enumerate(TARGET_LENGTHS) if T > 2]] > 0).all()  # the state
    model.loss(source, target).backward()
    for constraint in stiefel.constraints(model.decoder):
        assert all(leaf.grad.abs().max() > 0 for leaf in constraint.leaves)


def test_the_last_state_of_the_encoder_is_the_first_of_the_decoder():
    model = made("lstm", num_layers=2)
    source, target = sentences()
    starts = []
    original = model.decoder.stepper

    def stepper():
        step = original()

        def watched(x, state):
            starts.append(state)
            return step(x, state)

        return watched

    model.decoder.stepper = stepper
    model(source, target)
    encoded, state = model.encoder(
        model.source_embedding(source), lengths=torch.tensor(SOURCE_LENGTHS)
    )
    assert len(starts) == 5
    for a, b in zip(starts[0], state, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(starts[0][0][-1, 0], encoded[5, 0])


def test_batch_first():
    model = made(generator=torch.Generator().manual_seed(0))
    twin = made(generator=torch.Generator().manual_seed(0), batch_first=True)
    source, target = sentences()
    turned = twin(source.T, target.T, SOURCE_LENGTHS, TARGET_LENGTHS)
    assert torch.equal(turned.transpose(0, 1), model(source, target))
    assert torch.equal(twin.loss(source.T, target.T), model.loss(source, target))
    for search in ("greedy", "beam"):
        options = {"begin": BEGIN, "end": END, "max_length": 4}
        found = getattr(twin, search)(source.T, **options)
        other = getattr(model, search)(source, **options)
        assert torch.equal(found.tokens.T, other.tokens)
        assert torch.equal(found.scores, other.scores)


# --------------------------------------------------------------------- counts and contracts
def test_the_published_counts():
    """Spanish to English, 24,794 and 12,934 words, embeddings of 256 and 1024 hidden units."""

    def count(cell, effective=False, **options):
        model = Seq2Seq(24_794, 12_934, cell=cell, device="meta", **options)
        return round(model.expected_parameters(effective=effective) / 1e6, 1)

    assert count("rnn") == 28.7
    assert count("gru") == 36.0
    assert count("lstm") == 39.7
    assert count("orthogonal-rnn", via="exprnn", effective=True) == 27.6
    reflections = {1024: 28.7, 512: 27.6, 256: 27.1, 128: 26.9}
    for L, published in reflections.items():
        assert count("orthogonal-rnn", via="cwy", reflections=L) == published


@pytest.mark.parametrize("cell", CELLS)
def test_counts_by_formula(cell):
    for options in ({}, {"num_layers": 2, "learnable_h0": True, "attention_size": 3}):
        model = made(cell, **options)
        words, V = model.source_embedding.num_embeddings, model.head.out_features
        E, H = model.source_embedding.embedding_dim, model.head.in_features
        A = options.get("attention_size", H)
        networks = sum(rnn.expected_parameters() for rnn in (model.encoder, model.decoder))
        count = (words + V) * E + networks + A * (2 * H + 3) + V * (H + 1)
        assert model.expected_parameters() == count


def test_cells_by_name_class_and_function():
    assert isinstance(made(NNRNN, via="exprnn", mask="triangle").encoder, NNRNN)
    assert made().decoder.nonlinearity == "abs"
    assert made(nonlinearity="tanh").decoder.nonlinearity == "tanh"
    assert made(via="rgd-c-c").decoder.via == "rgd-c-c"
    model = made(lambda features: ASRNN(features, 5, via="cayley", dtype=torch.float64))
    assert (model.encoder.input_size, model.decoder.input_size) == (3, 8)
    assert len(list(stiefel.constraints(model))) == 4
    model = made("lstm", forget_bias=1.0)
    assert (model.encoder.network.bias_ih_l0[5:10] == 1).all()


@pytest.mark.parametrize("cell", CELLS)
def test_copies_and_checkpoints(cell):
    model = made(cell, learnable_h0=True)
    source, target = sentences()
    expected = model(source, target)
    other = made(cell, learnable_h0=True)
    assert not torch.equal(other(source, target), expected)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(source, target), expected)
    assert torch.equal(copy.deepcopy(model)(source, target), expected)
    single = model.float()(source, target)
    assert single.dtype == torch.float32
    assert (single - expected).abs().max() < 1e-4


@pytest.mark.parametrize("cell", ["orthogonal-rnn", "lstm"])
def test_autocast(cell):
    model = made(cell, dtype=torch.float32)
    source, target = sentences()
    expected = model(source, target)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits, loss = model(source, target), model.loss(source, target)
        model.beam(source, begin=BEGIN, end=END, max_length=3)
    assert (logits.float() - expected).abs().max() < 0.05
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    half = model.bfloat16()(source, target)
    assert half.dtype == torch.bfloat16
    assert (half.float() - expected).abs().max() < 0.3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("via", ["cwy", "rgd-c-c"])
def test_compile_fullgraph(via):
    torch.compiler.reset()
    model = made(via=via)
    arguments = (*sentences(), torch.tensor(SOURCE_LENGTHS), torch.tensor(TARGET_LENGTHS))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    logits, expected = compiled(*arguments), model(*arguments)
    assert (logits - expected).abs().max() < 1e-12
    leaves = list(model.parameters())
    slopes = torch.autograd.grad(logits.square().sum(), leaves)
    for a, b in zip(slopes, torch.autograd.grad(expected.square().sum(), leaves), strict=True):
        assert (a - b).abs().max() < 1e-11


def train_together(rank, path, queue):
    """Whether two processes, with sentences of their own, have one set of weights at the end."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    agree = {}
    for cell in CELLS:
        torch.manual_seed(0)
        model = torch.nn.parallel.DistributedDataParallel(made(cell, learnable_h0=True))
        before = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer = stiefel.optim.build(model, lr=1e-2, lr_orthogonal=1e-2)
        torch.manual_seed(rank + 1)
        for _ in range(2):
            optimizer.zero_grad()
            source, target = sentences()
            model(source, target).square().mean().backward()
            optimizer.step()
        moved = all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        total = torch.stack([p.detach().abs().sum() for p in model.parameters()])
        gathered = [torch.zeros_like(total) for _ in range(2)]
        dist.all_gather(gathered, total)
        agree[cell] = moved and torch.equal(*gathered)
    if rank == 0:
        queue.put(agree)
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_ddp_on_two_gloo_processes(tmp_path):
    queue = torch.multiprocessing.get_context("spawn").SimpleQueue()
    torch.multiprocessing.spawn(train_together, (str(tmp_path / "store"), queue), nprocs=2)
    assert queue.get() == dict.fromkeys(CELLS, True)


# ------------------------------------------------------------------------------- training
@pytest.mark.parametrize("via", ["cwy", "rgd-c-c"])
def test_it_memorises_a_batch(via):
    torch.manual_seed(0)
    model = Seq2Seq(12, 12, 8, 24, via=via, dtype=torch.float64)
    source, lengths = torch.randint(3, 12, (5, 8)), torch.randint(2, 6, (8,))
    target = torch.zeros(7, 8, dtype=torch.int64)
    for b, steps in enumerate(lengths.tolist()):
        words = torch.randint(3, 12, (steps,))
        target[: steps + 2, b] = torch.tensor([BEGIN, *words.tolist(), END])
        source[steps:, b] = 0
    optimizer = stiefel.optim.build(model, lr=2e-2, lr_orthogonal=5e-3, lr_riemannian=5e-2)
    for _ in range(100):
        optimizer.zero_grad()
        loss = model.loss(source, target)
        loss.backward()
        optimizer.step()
    assert loss < 0.05
    found = model.greedy(source, begin=BEGIN, end=END, max_length=6)
    for b, steps in enumerate(lengths.tolist()):
        assert written(found, b) == target[1 : steps + 2, b].tolist()
    for constraint in stiefel.constraints(model):
        assert stiefel.geometry.orthonormality_residual(constraint.point) < 1e-12


def test_errors_teach():
    model, (source, target) = made(), sentences()
    with pytest.raises(errors.UnknownNameError, match="orthogonal-rnn"):
        made("transformer")
    with pytest.raises(errors.ConfigurationError, match="derive it from RecurrentNetwork"):
        made(ConvNERU)
    with pytest.raises(errors.ConfigurationError, match="no further options"):
        made(lambda features: LSTM(features, 5), forget_bias=1.0)
    with pytest.raises(errors.ConfigurationError, match="of 3 inputs and 5 hidden units"):
        made(lambda features: LSTM(features, 6))
    with pytest.raises(errors.ConfigurationError, match="one kind of state"):
        made(lambda features: (LSTM if features == 3 else GRU)(features, 5))
    with pytest.raises(errors.ConfigurationError, match="target_vocabulary"):
        Seq2Seq(5, 0)
    with pytest.raises(errors.ConfigurationError, match="padding"):
        made(padding=8)
    with pytest.raises(errors.ShapeError, match=r"source tokens of shape \(T, B\)"):
        model(source[:, 0], target)
    with pytest.raises(errors.DtypeError, match="numbers of words"):
        model(source.double(), target)
    with pytest.raises(errors.ShapeError, match="as many targets as sources"):
        model(source, target[:, :2])
    with pytest.raises(errors.ShapeError, match="from 1 to T = 6"):
        model(source, target, [7, 1, 1])
    with pytest.raises(errors.ShapeError, match="nor empty"):
        model(torch.zeros_like(source), target)
    with pytest.raises(errors.ShapeError, match="begin and end"):
        model.loss(source, target[:1])
    with pytest.raises(errors.ConfigurationError, match="end to be a token"):
        model.greedy(source, begin=1, end=7)
    with pytest.raises(errors.ConfigurationError, match="width"):
        model.beam(source, begin=1, end=2, width=0)
    with pytest.raises(errors.ConfigurationError, match="max_length"):
        model.greedy(source, begin=1, end=2, max_length=0)


def test_a_sentence_of_one_token_has_nothing_to_predict():
    model, (source, target) = made(), sentences()
    target[1:, 0] = 0
    lengths = torch.tensor(TARGET_LENGTHS) - 1
    lengths[0] = 0
    wanted = masked_cross_entropy(model(source, target[:-1]), target[1:], lengths)
    assert (model.loss(source, target) - wanted).abs() < 1e-12


def test_words_of_an_orthogonal_network_keep_their_norm():
    """Without input, |s_t| is constant in encoder and decoder: abs and an orthogonal weight."""
    model = made(OrthogonalRNN)
    step, state = model.decoder.stepper(), torch.randn(1, 2, 5, dtype=torch.float64).abs()
    norm = state.norm(dim=2)
    for _ in range(50):
        _, state = step(torch.zeros(2, 8, dtype=torch.float64), state)
    assert (state.norm(dim=2) - norm).abs().max() < 1e-12


def test_int32_tokens_are_those_of_int64():
    model = Seq2Seq(9, 9, 4, 6)
    source, target = torch.randint(1, 9, (5, 2)), torch.randint(1, 9, (4, 2))
    assert torch.equal(model(source.int(), target.int()), model(source, target))
    assert torch.equal(model.loss(source.int(), target.int()), model.loss(source, target))


def test_dtypes_that_do_not_fit_are_errors_when_it_is_built():
    with pytest.raises(errors.DtypeError, match="real floating point dtype for Seq2Seq"):
        Seq2Seq(9, 9, 4, 6, nonlinearity="modrelu", dtype=torch.complex64)
    with pytest.raises(errors.ConfigurationError, match=r"in torch\.float32"):
        Seq2Seq(9, 9, 4, 6, cell=lambda F: OrthogonalRNN(F, 6, dtype=torch.complex64))
