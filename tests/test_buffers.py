"""Memory that is used again: never while anybody can still see it, and no more than was held."""

import gc
import threading

import torch

from graticule.data.buffers import Pool


def test_memory_is_not_lent_again_while_anything_of_it_is_held() -> None:
    pool = Pool()
    (whole,) = pool.take([(4, 8)], torch.float32)
    whole.fill_(1.0)
    holders = {
        "view": whole[1:2, 3], "array": whole.numpy()[2:], "bytes": whole.view(torch.int32),
    }  # fmt: skip
    graph = (whole * torch.ones(1, requires_grad=True)).sum()
    place = whole.data_ptr()
    del whole
    for name in (*holders, "graph"):
        (other,) = pool.take([(4, 8)], torch.float32)
        assert other.data_ptr() != place, f"lent again before the {name} went"
        other.fill_(2.0)
        if name == "graph":
            graph.backward()
        else:
            assert (torch.as_tensor(holders[name]).view(torch.float32) == 1.0).all()
        holders.pop(name, None)
    del graph, other
    gc.collect()
    taken = [pool.take([(4, 8)], torch.float32)[0] for _ in range(3)]
    assert place in {tensor.data_ptr() for tensor in taken}


def test_tensors_of_one_loan_lie_side_by_side_and_keep_each_other() -> None:
    pool = Pool()
    first, second, empty = pool.take([(3,), (2, 2), (0, 5)], torch.int16)
    assert (first.shape, second.shape, empty.shape) == ((3,), (2, 2), (0, 5))
    first.fill_(1)
    second.fill_(2)
    assert first.tolist() == [1, 1, 1]
    del second, empty
    (other,) = pool.take([(3,)], torch.int16)
    other.fill_(9)
    assert first.tolist() == [1, 1, 1]


def test_what_is_allocated_is_the_most_that_was_ever_held() -> None:
    pool = Pool()
    for held in (1, 3, 2, 3, 1):
        tensors = [pool.take([(256,)], torch.float32)[0] for _ in range(held)]
        assert len({tensor.data_ptr() for tensor in tensors}) == held
        del tensors
    assert pool.allocated_bytes == 3 * 1024


def test_a_small_loan_does_not_take_a_large_block() -> None:
    pool = Pool()
    pool.take([(4096,)], torch.uint8)
    pool.take([(64,)], torch.uint8)
    assert pool.allocated_bytes == 4096 + 64
    pool.take([(3000,)], torch.uint8)
    assert pool.allocated_bytes == 4096 + 64


def test_no_shape_needs_no_memory() -> None:
    pool = Pool()
    assert [t.shape for t in pool.take([(2, 0, 3)], torch.float32)] == [(2, 0, 3)]
    assert pool.allocated_bytes == 0


def test_threads_that_take_and_drop_never_share_memory() -> None:
    pool, wrong = Pool(), []

    def work(number: int) -> None:
        for _ in range(300):
            (tensor,) = pool.take([(64,)], torch.int32)
            tensor.fill_(number)
            if (tensor != number).any():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert pool.allocated_bytes <= 2 * 4 * 256  # the old one is held while the new one is taken
