"""What becomes of a lead once it is computed: the file, what a restart needs, the log."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from graticule.forecast import log
from graticule.forecast.clock import Clock
from graticule.forecast.collect import Collector
from graticule.forecast.predict import Predictor
from graticule.forecast.restart import Record
from graticule.forecast.schedule import Places
from graticule.forecast.writer import ForecastWriter
from graticule.parallel.together import Together
from graticule.variables import Channels


class Keeper:
    """Brings leads to the rank that writes them, one field at a time, and writes them there."""

    def __init__(
        self,
        writer: ForecastWriter | None,
        predictor: Predictor,
        collector: Collector,
        together: Together,
        *,
        channels: Channels,
        clock: Clock,
        places: Places,
        valid_times: np.ndarray,
        restart_every: int,
        log_every: int,
    ) -> None:
        """writer: on the first rank of a sample. channels: of the file, all of them. places: of
        the whole forecast. valid_times: (initial time, lead of the file).
        restart_every, log_every: in model steps; 0: never."""
        self._writer, self._predictor, self._together = writer, predictor, together
        self._collector, self._channels = collector, channels
        self._clock, self._places, self._valid_times = clock, places, valid_times
        self._restart_every, self._log_every = restart_every, log_every
        self._num_outputs = len(predictor.source.spec.outputs)
        self._leads = valid_times.shape[1] // self._num_outputs
        self._area = predictor.source.store.grid.cell_area
        self._statistics: dict[int, np.ndarray] = {}

    def take(self, places: Sequence[int], lead: int, field: Tensor, states: Tensor) -> None:
        """Write a lead of some places, and what the next begins with where that is due.

        field: (place, output offset, predicted channel, lat, lon); states: (place, input offset,
        prognostic channel, lat, lon); normalised, of this rank's stripe and channels. All ranks of
        a sample call it. What fails is kept in `together`.
        """
        written = 0
        for place, outputs in zip(places, field, strict=True):
            for file_lead, values in enumerate(outputs, start=(lead - 1) * self._num_outputs):
                with self._clock("copy"):
                    whole = self._collector.predicted(self._predictor.in_units(values))
                if self._writer is None or whole is None:
                    continue
                with self._together.attempt():  # all hear of it when they read the next lead
                    with self._clock("write"):
                        self._writer.write(place, file_lead, whole)
                    written += 1
            if self._writer is not None and whole is not None and self._logs(lead):
                with self._clock("log"):
                    self._statistics[place] = log.statistics(whole, self._area)
        if places and self._keeps(lead):
            with self._clock("restart"):
                sound = written == len(places) * self._num_outputs
                self._keep(places, lead, states, sound)

    def _keeps(self, lead: int) -> bool:
        return log.chosen(lead, self._leads, self._restart_every)

    def _logs(self, lead: int) -> bool:
        return log.chosen(lead, self._leads, self._log_every)

    def _keep(self, places: Sequence[int], lead: int, states: Tensor, sound: bool) -> None:
        """sound: this lead is written, where this rank writes."""
        writer, record, put = self._writer, None, 0
        with self._together.attempt():
            if writer is not None and sound:
                before = (lead - 1) // self._restart_every * self._restart_every
                for place in places:
                    writer.sync(place, range(before * self._num_outputs, lead * self._num_outputs))
                record = Record(writer.path, places, lead)
        rest = places if lead < self._leads else ()
        for place, its in zip(rest, states, strict=False):
            whole = self._collector.states(its)
            with self._together.attempt():
                if record is not None and whole is not None:
                    record.put(place, whole)
                    put += 1
        with self._together.attempt():
            if record is not None and put == len(rest):
                record.seal()

    def log(self, at: Mapping[int, int], init_times: Sequence[Any]) -> None:
        """Log those leads of a step that are due: the first process does. A collective.

        at: the lead of each place, on all processes.
        """
        due = [place for place, lead in at.items() if self._logs(lead)]
        if not due:
            return
        channels = self._channels
        ours = np.zeros((len(due), len(log.STATISTICS), len(channels)))
        for row, place in enumerate(due):
            if place in self._statistics:
                ours[row] = self._statistics.pop(place)
        (values,) = self._together.add([ours])
        if self._together.rank > 0:
            return
        assert self._writer is not None, "the first process writes"
        path = log.log_path(self._writer.path)
        with self._together.attempt():
            for place, its in zip(due, values, strict=True):
                lead = at[place] * self._num_outputs
                start, member = self._places.start(place), self._places.member(place)
                log.add(
                    path, channels, its, init_time=str(init_times[start]),
                    **({} if member is None else {"member": member}), lead=lead,
                    valid_time=str(self._valid_times[start, lead - 1]), seconds=self._clock.stop(),
                )  # fmt: skip
