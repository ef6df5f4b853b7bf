import json

from harness.nodes.checks import CHECKS, judge_all
from harness.nodes.facts import Status
from harness.nodes.report import Look, plain, render, to_json
from harness.nodes.ssh import Login

BASIC = ["resolve", "port", "login", "shell", "cpu"]


def text_of(cluster, *, look=None, checks=BASIC):
    survey = cluster.survey()
    return render(survey, judge_all(survey, checks), checks, look or Look())


def test_the_table_has_a_row_for_each_host_and_a_word_for_each_check(hosts):
    text = text_of(hosts(3).fail_login(1, Login.DENIED, login_detail="Permission denied"))
    assert text.splitlines()[:4] == [
        "host  resolve  port  login     shell    cpu",
        "n0    OK       OK    OK        OK       OK",
        "n1    OK       OK    CRITICAL  UNKNOWN  UNKNOWN",
        "n2    OK       OK    OK        OK       OK",
    ]


def test_consequences_are_not_findings(hosts):
    text = text_of(hosts(3).fail_login(1, Login.DENIED, login_detail="Permission denied"))
    findings = text.split("\n\n")[2].splitlines()
    assert findings == [
        "CRITICAL  n1: login: asks for more than a key: Permission denied",
        "          remedy: ssh-copy-id n1 (first ssh-keygen -t ed25519 if you have no key); "
        "if your key has a passphrase: ssh-add",
    ]
    assert text.endswith("CRITICAL: 2 of 3 hosts are ready.\n")


def test_a_consequence_is_told_where_its_cause_is_not_shown(hosts):
    text = text_of(hosts(2).fail_login(1, Login.DENIED), checks=["cpu"])
    assert "UNKNOWN   n1: cpu: not looked at: login failed" in text


def test_equal_findings_of_several_hosts_are_one(hosts):
    cluster = hosts(5)
    for index in (0, 1, 2, 4):
        cluster.facts(index, load_1min=6.0)
    text = text_of(cluster)
    assert "WARN      n[0-2], n4: cpu: load 6 on 8 cores" in text
    assert "remedy: ssh HOST top -b -n 1, and wait or ask its owner" in text
    assert text.count("remedy") == 1


def test_a_host_cannot_steer_the_terminal(hosts):
    cluster = hosts(1).facts(0, shell="/bin/\x1b[2Jtcsh\x07")
    text = text_of(cluster, look=Look(width=100))
    assert "\x1b" not in text
    assert plain("a\x1b[31m\nb") == "a?[31m?b"


def test_a_narrow_terminal_gets_the_table_in_blocks(hosts):
    text = text_of(hosts(2), look=Look(width=40), checks=list(CHECKS))
    table = text.split("\n\nn[")[0].split("\n\nn0, n1:")[0]
    assert table.count("\nn0 ") == table.count("host ") > 1
    assert max(map(len, table.splitlines())) <= 40


def test_json_holds_every_finding_and_its_schema(hosts, full_mesh):
    cluster = hosts(2).fail_login(1, Login.UNKNOWN_KEY)
    survey = cluster.survey(pairs=full_mesh(2))
    findings = judge_all(survey, CHECKS)
    document = json.loads(to_json(survey, findings, started_utc="2026-01-01", duration_s=1.5))
    assert (document["schema"], document["version"]) == ("harness-nodes", 1)
    assert document["status"] == "CRITICAL"
    assert [host["status"] for host in document["hosts"]] == ["UNKNOWN", "CRITICAL"]
    assert document["hosts"][1]["facts"] is None
    assert {f["check"] for f in document["hosts"][1]["findings"]} == set(CHECKS)
    login = next(f for f in document["hosts"][1]["findings"] if f["check"] == "login")
    assert login["status"] == Status.CRITICAL.name
    assert login["remedy"].startswith("ssh n1 true, and answer yes")
    assert document["hosts"][0]["facts"]["cpu_model"] == "AMD EPYC"
    assert document["pairs"][0] == {
        "source": "n0", "target": "n1", "rtt_s": 0.0002, "error": "", "detail": "10.0.0.1"
    }  # fmt: skip
