"""Every cell of the table of what each kind of runtime protects from is shown by tests, named here by the cell's mark."""

from __future__ import annotations

import re

from tests import ROOT

PAGE = (ROOT / "docs/runtimes.md").read_text().partition("## What each kind protects from")[2].partition("\n## ")[0]
FOLDER = ROOT / "tests/rollout/runtimes"
SHOWN_BY: dict[str, list[str]] = {
    "L1": [
        "local/test_local.py::test_the_system_is_read_only_and_what_is_the_nodes_is_not_there",
        "local/test_local.py::test_a_link_that_a_command_left_leads_the_node_nowhere",
    ],
    "L2": [
        "test_contract.py::test_the_proxy_is_reached_and_nothing_else",
        "test_contract.py::test_with_the_whole_network_the_proxy_is_reached_and_what_is_outside",
    ],
    "L3": [
        "local/test_local.py::test_the_system_is_read_only_and_what_is_the_nodes_is_not_there",
        "test_contract.py::test_what_a_command_left_running_ends_with_it",
    ],
    "L4": [
        "test_contract.py::test_an_agent_that_wants_out_finds_no_call_that_helps",
        "test_seccomp.py::test_a_sandbox_makes_no_namespaces_and_mounts_nothing",
        "test_seccomp.py::test_sockets_are_of_families_that_end_in_the_sandbox",
    ],
    "L5": [
        "test_contract.py::test_a_command_that_takes_too_much_memory_ends_with_137",
        "local/test_local.py::test_without_a_control_group_the_node_watches_memory_and_processes",
        "local/test_local.py::test_nothing_that_a_command_can_write_lies_in_memory",
    ],
    "L6": [
        "local/test_local.py::test_a_file_may_be_no_greater_than_the_disk_of_the_spec",
        "test_contract.py::test_files_that_are_too_large_together_end_their_command",
    ],
    "L7": ["test_contract.py::test_home_and_workdir_are_there_empty_and_writable_and_nobody_elses"],
    "N1": [
        "local/test_local.py::test_what_a_local_runtime_cannot_be_is_refused",
        "local/test_local.py::test_without_a_sandbox_nothing_is_kept_from_a_command",
    ],
    "N2": ["test_contract.py::test_with_the_whole_network_the_proxy_is_reached_and_what_is_outside"],
    "N3": [
        "test_contract.py::test_what_a_command_left_running_ends_with_it",
        "test_contract.py::test_stop_ends_everything_and_may_be_called_again",
    ],
    "N5": [
        "test_contract.py::test_a_command_that_takes_too_much_memory_ends_with_137",
        "local/test_local.py::test_without_a_sandbox_too",
    ],
    "N7": [
        "test_contract.py::test_home_and_workdir_are_there_empty_and_writable_and_nobody_elses",
        "local/test_local.py::test_without_a_sandbox_nothing_is_kept_from_a_command",
    ],
    "D1": ["container/test_container_hardening.py::test_a_container_sees_nothing_of_the_machine"],
    "D2": [
        "test_contract.py::test_the_proxy_is_reached_and_nothing_else",
        "container/test_container_hardening.py::test_the_whole_network_is_not_the_nodes",
    ],
    "D3": [
        "container/test_container_hardening.py::test_a_container_sees_nothing_of_the_machine",
        "test_contract.py::test_what_a_command_left_running_ends_with_it",
    ],
    "D4": [
        "test_contract.py::test_an_agent_that_wants_out_finds_no_call_that_helps",
        "container/test_container_hardening.py::test_an_engine_that_applies_no_filter_starts_nothing",
        "container/test_container_hardening.py::test_root_inside_has_what_installing_packages_takes_and_no_program_gives_more",
        "container/test_container_hardening.py::test_another_user_has_no_capability_and_its_files_are_its_own",
        "container/test_container_entering.py::test_the_nodes_own_interpreter_cannot_be_written_by_what_it_starts",
    ],
    "D5": [
        "test_contract.py::test_a_command_that_takes_too_much_memory_ends_with_137",
        "container/test_container_hardening.py::test_a_container_sees_nothing_of_the_machine",
    ],
    "D6": [
        "container/test_container_entering.py::test_a_step_with_the_network_has_the_limits_of_the_others",
        "test_contract.py::test_files_that_are_too_large_together_end_their_command",
    ],
    "D7": [
        "test_contract.py::test_home_and_workdir_are_there_empty_and_writable_and_nobody_elses",
        "container/test_container_hardening.py::test_rollouts_with_the_whole_network_do_not_reach_each_other",
    ],
    "A1": ["container/test_apptainer.py::test_an_instance_sees_nothing_of_the_machine_and_has_its_limits"],
    "A2": [
        "test_contract.py::test_the_proxy_is_reached_and_nothing_else",
        "container/test_apptainer.py::test_a_step_cannot_have_another_network_than_its_instance",
    ],
    "A3": [
        "test_contract.py::test_what_a_command_left_running_ends_with_it",
        "container/test_apptainer.py::test_a_hidden_daemon_that_holds_the_output_keeps_nobody_waiting",
    ],
    "A4": [
        "test_contract.py::test_an_agent_that_wants_out_finds_no_call_that_helps",
        "container/test_apptainer.py::test_a_machine_without_it_and_a_node_that_is_root_are_told",
        "container/test_apptainer.py::test_variables_that_are_flags_of_apptainer_open_no_instance",
    ],
    "A5": [
        "test_contract.py::test_a_command_that_takes_too_much_memory_ends_with_137",
        "container/test_apptainer.py::test_an_instance_sees_nothing_of_the_machine_and_has_its_limits",
    ],
    "A6": [
        "container/test_apptainer.py::test_a_file_is_held_to_the_size_of_the_disk",
        "test_contract.py::test_files_that_are_too_large_together_end_their_command",
        "container/test_apptainer.py::test_what_is_written_is_kept_in_memory_where_that_is_asked_for",
    ],
    "A7": [
        "test_contract.py::test_home_and_workdir_are_there_empty_and_writable_and_nobody_elses",
        "container/test_apptainer.py::test_instances_of_others_are_left_alone",
    ],
    "K1": ["kubernetes/test_kubernetes.py::test_a_pod_asks_for_what_it_may_use_and_has_no_token"],
    "K2": [
        "kubernetes/test_kubernetes.py::test_a_policy_lets_pods_out_to_the_proxy_alone_and_nobody_in",
        "kubernetes/test_kubernetes.py::test_nothing_starts_that_no_policy_holds_where_one_is_to_be_there",
    ],
    "K3": ["test_contract.py::test_what_a_command_left_running_ends_with_it"],
    "K4": [
        "test_contract.py::test_an_agent_that_wants_out_finds_no_call_that_helps",
        "kubernetes/test_kubernetes.py::test_commands_are_a_users_without_capabilities_and_roots_only_where_that_is_asked_for",
    ],
    "K5": [
        "test_contract.py::test_a_command_that_takes_too_much_memory_ends_with_137",
        "kubernetes/test_kubernetes.py::test_a_pod_asks_for_what_it_may_use_and_has_no_token",
    ],
    "K6": ["kubernetes/test_kubernetes.py::test_a_pod_asks_for_what_it_may_use_and_has_no_token"],
    "K7": [
        "test_contract.py::test_home_and_workdir_are_there_empty_and_writable_and_nobody_elses",
        "kubernetes/test_kubernetes.py::test_a_policy_lets_pods_out_to_the_proxy_alone_and_nobody_in",
    ],
}
"""The tests of each mark, in `FOLDER`; those of test_contract.py run on every kind."""


def test_every_cell_of_the_table_is_shown_by_tests_that_exist() -> None:
    rows = [line.strip("|").split("|") for line in PAGE.splitlines() if line.startswith("| ")]
    kinds, cells = len(rows[0]) - 1, [cell for row in rows[1:] for cell in row[1:]]
    assert kinds == 5 and len(cells) == 7 * kinds
    marks = [re.search(r"\((\w\d)\) *$", cell) for cell in cells]
    assert all(marks), [cell for cell, mark in zip(cells, marks, strict=True) if not mark]
    assert {mark[1] for mark in marks if mark} == SHOWN_BY.keys() and all(SHOWN_BY.values())
    for named in {each for tests in SHOWN_BY.values() for each in tests}:
        file, _, name = named.partition("::")
        assert re.search(rf"^(async )?def {name}\(", (FOLDER / file).read_text(), re.MULTILINE), named
