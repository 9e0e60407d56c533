from __future__ import annotations

import pytest

from nereus.clusters.local import Local
from nereus.core import Boundary, SettingsError


def test_every_device_has_the_capacity_and_the_speed() -> None:
    found = Local(devices=6, capacity="24 MiB", speed=0.3, cores=2).cluster()
    assert found.ids == (0, 1, 2, 3, 4, 5)
    assert {found.kind(device).memory_bytes for device in found.ids} == {24 * 2**20}
    assert {found.kind(device).speed for device in found.ids} == {0.3}


def test_host_memory_is_of_the_machine_and_none_unless_given() -> None:
    assert Local(2, "1 MB", cores=2).cluster().host_bytes() == {}
    assert Local(2, "1 MB", host_memory="3 MB", cores=2).cluster().host_bytes() == {0: 3 * 10**6}


def test_all_devices_are_there_at_every_boundary() -> None:
    assert Local(devices=2, capacity=10**6, cores=2).available(Boundary(7, 1.0)) == {0, 1}


def test_more_speed_than_cores_is_refused_with_what_would_do() -> None:
    with pytest.raises(SettingsError, match=r"7 devices x speed 0.3 = 2.1 cores, 2 are here") as caught:
        Local(devices=7, capacity="1 MB", speed=0.3, cores=2)
    message = str(caught.value)
    assert "at most 0.28" in message
    assert "at most 6 devices" in message
    assert "oversubscribe: true" in message


def test_what_the_message_proposes_is_accepted() -> None:
    Local(devices=7, capacity="1 MB", speed=0.28, cores=2)
    Local(devices=6, capacity="1 MB", speed=0.3, cores=2)
    Local(devices=7, capacity="1 MB", speed=0.3, cores=2, oversubscribe=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": 0}, "0 devices, must be at least 1"),
        ({"speed": 0.0}, "speed 0.0"),
        ({"speed": 1.5}, "speed 1.5"),
        ({"capacity": "24 MX"}, "capacity '24 MX' is not a size"),
        ({"capacity": "-1 MB"}, "not a size"),
        ({"capacity": 0}, "more than 0 bytes"),
        ({"host_memory": "lots"}, "host_memory 'lots' is not a size"),
    ],
)
def test_bad_options_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        Local(**({"devices": 1, "capacity": "1 MB", "cores": 1} | options))  # type: ignore[arg-type]
