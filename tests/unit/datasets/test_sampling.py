# SPDX-License-Identifier: Apache-2.0
"""Which samples: seed, number, order, ranks, and that no more than needed is touched."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
import torch.distributed as dist

from llmcompressor.args import DatasetArguments
from llmcompressor.datasets import get_rank_partition, load_calibration, sampling
from llmcompressor.datasets import utils as datasets_utils

ROWS = [[i + 10, i + 11] for i in range(100)]


def first_ids(batches):
    return [int(row[0]) - 10 for batch in batches for row in batch["input_ids"]]


def test_without_shuffle_the_first_samples_are_taken(batches):
    got = batches(ROWS, shuffle_calibration_samples=False, num_calibration_samples=7)
    assert first_ids(got) == list(range(7))


def test_shuffled_samples_are_distinct_and_decided_by_the_seed(batches):
    one = first_ids(batches(ROWS, num_calibration_samples=30, seed=1))
    assert len(set(one)) == 30
    assert one == first_ids(batches(ROWS, num_calibration_samples=30, seed=1))
    assert one != first_ids(batches(ROWS, num_calibration_samples=30, seed=2))
    assert one != sorted(one)


def test_a_smaller_number_takes_the_beginning_of_a_larger(batches):
    many = first_ids(batches(ROWS, num_calibration_samples=30))
    assert first_ids(batches(ROWS, num_calibration_samples=10)) == many[:10]


def test_workers_change_nothing(batches):
    texts = [f"value_{i} = {i}" for i in range(20)]
    one = [batch["input_ids"].tolist() for batch in batches(texts, seed=4)]
    two = [
        batch["input_ids"].tolist() for batch in batches(texts, seed=4, preprocessing_num_workers=2)
    ]
    assert one == two


def test_a_loader_repeats_and_leaves_the_global_generator_alone():
    loader = load_calibration(
        DatasetArguments(dataset=ROWS, batch_size=3, num_calibration_samples=9)
    )
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    first, second = first_ids(loader), first_ids(loader)
    assert first == second
    assert torch.equal(torch.random.get_rng_state(), before)


def test_none_means_all(batches, logged):
    assert len(batches(ROWS, num_calibration_samples=None, max_seq_length=16)) == 100
    assert not logged


def test_of_many_rows_only_the_chosen_ones_are_tokenized(batches, tokenizer):
    class Counting:
        """A large data set that counts what is asked of it."""

        asked = 0

        def __len__(self):
            return 1_000_000

        def __getitem__(self, index):
            type(self).asked += 1
            return f"x = {index}"

    assert len(batches(Counting(), num_calibration_samples=16)) == 16
    assert Counting.asked == 16


class TestRanks:
    @pytest.fixture
    def ranks(self, monkeypatch):
        """Pretend to be one of several processes, all with the same data or not."""

        def be(rank, size, *, same=True):
            monkeypatch.setattr(sampling, "rank_and_world_size", lambda: (rank, size))
            monkeypatch.setattr(
                "llmcompressor.datasets.sampling.rank_and_world_size", lambda: (rank, size)
            )
            monkeypatch.setattr(
                "llmcompressor.datasets.sampling.has_same_rows_everywhere", lambda rows, size: same
            )

        return be

    def test_one_process_has_all(self):
        assert get_rank_partition("train", 64) == "train[0:64]"
        assert datasets_utils.get_rank_partition is get_rank_partition

    def test_the_parts_are_contiguous_and_complete(self, ranks):
        parts = []
        for rank in range(3):
            ranks(rank, 3)
            parts.append(get_rank_partition("train_sft", 64))
        assert parts == ["train_sft[0:21]", "train_sft[21:42]", "train_sft[42:64]"]

    @pytest.mark.parametrize("shuffle", [True, False])
    def test_ranks_share_what_one_process_would_take(self, ranks, batches, shuffle):
        options = {"num_calibration_samples": 20, "shuffle_calibration_samples": shuffle}
        alone = first_ids(batches(ROWS, **options))
        together = []
        for rank in range(3):
            ranks(rank, 3)
            together += first_ids(batches(ROWS, **options))
        assert together == alone

    def test_ranks_with_different_data_take_all_of_their_own(self, ranks, batches, logged):
        ranks(1, 2, same=False)
        own = ROWS[50:60]
        options = {"num_calibration_samples": 20, "shuffle_calibration_samples": False}
        assert first_ids(batches(own, **options, max_seq_length=16)) == list(range(50, 60))
        assert not logged

    def test_a_stream_is_dealt_out(self, ranks, batches):
        together = []
        for rank in range(2):
            ranks(rank, 2)
            together += first_ids(batches(iter(ROWS), num_calibration_samples=20))
        assert sorted(together) == list(range(20))

    def test_real_processes_compare_their_data(self, tmp_path):
        context = multiprocessing.get_context("forkserver")
        with ProcessPoolExecutor(2, context) as workers:
            places = [(rank, str(tmp_path / "store")) for rank in range(2)]
            out = list(workers.map(_ids_of_a_rank, places, timeout=120))
        assert out == [([0, 1, 2], [0, 1, 2]), ([3, 4, 5], [5, 6, 7])]


def _ids_of_a_rank(place: tuple[int, str]) -> tuple[list[int], list[int]]:
    """What one of two processes gets of data that both have, and of data of its own."""
    rank, store = place
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    rows = [[i, i] for i in range(10)]

    def ids(data: list[list[int]]) -> list[int]:
        options = {"num_calibration_samples": 6, "shuffle_calibration_samples": False}
        loader = load_calibration(DatasetArguments(dataset=data, **options))
        return [int(batch["input_ids"][0, 0]) for batch in loader]

    try:
        return ids(rows), ids(rows[5 * rank : 5 * rank + 5])
    finally:
        dist.destroy_process_group()
