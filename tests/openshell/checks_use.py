"""Commands, services, connections, logs and watches."""

import queue
import time
import urllib.request

from openshell import DeletionOutcome
from openshell._proto import openshell_pb2 as os_pb2

from harness import WORKSPACE, Code, check, equal, fails, scope, watching

# --- exec


@check(guest=True)
def exec_gives_both_streams_and_the_exit_code(w):
    done = w.client.exec("box", ["sh", "-c", "echo out; echo err >&2; exit 3"], workspace=WORKSPACE)
    equal((done.exit_code, done.stdout, done.stderr), (3, "out\n", "err\n"))


@check(guest=True)
def exec_has_the_environment_folder_and_stdin_it_was_given(w):
    script = 'echo "$GREETING|$A|$PWD"; cat'
    done = w.client.exec(
        "box", ["sh", "-c", script], workspace=WORKSPACE, env={"A": "b $c"}, workdir="/tmp", stdin=b"in\0put"
    )
    equal(done.stdout, "hi there|b $c|/tmp\nin\0put")


@check(guest=True)
def exec_without_stdin_reads_its_end(w):
    equal(w.client.exec("box", ["cat"], workspace=WORKSPACE, timeout_seconds=30).stdout, "")


@check(guest=True)
def exec_takes_arguments_as_they_are(w):
    words = ["a b", "$(id)", "new\nline", "", "ü"]
    done = w.client.exec("box", ["printf", "%s\\n", *words], workspace=WORKSPACE)
    equal(done.stdout, "".join(f"{word}\n" for word in words))


@check(guest=True)
def exec_streams_more_than_one_message_holds(w):
    size = (4 << 20) + 1
    done = w.client.exec("box", ["sh", "-c", f"head -c {size} /dev/zero"], workspace=WORKSPACE)
    equal((done.exit_code, len(done.stdout)), (0, size))


@check(guest=True)
def exec_that_takes_too_long_ends_with_124(w):
    done = w.client.exec("box", ["sleep", "600"], workspace=WORKSPACE, timeout_seconds=1)
    equal(done.exit_code, 124)


@check(guest=True)
def exec_of_what_is_not_there_ends_as_in_a_shell(w):
    done = w.client.exec("box", ["no-such-program"], workspace=WORKSPACE)
    assert done.exit_code == 127 and "no-such-program" in done.stderr, done
    equal(w.client.exec("box", ["/etc/passwd"], workspace=WORKSPACE).exit_code, 126)


@check(guest=True)
def exec_python_calls_a_function_in_the_sandbox(w):
    session = w.client.get_session("box", workspace=WORKSPACE)

    def where(a, b=0):
        import os

        return f"{a + b} in {os.uname().nodename}"

    done = session.exec_python(where, args=(40,), kwargs={"b": 2})
    equal((done.exit_code, done.stdout), (0, "42 in box\n"))

    def breaks():
        raise ValueError("on purpose")

    done = session.exec_python(breaks)
    assert done.exit_code == 1 and "on purpose" in done.stderr, done


def converse(w, first):
    """An interactive command: its events, and a queue whose items are sent."""
    sent = queue.Queue()
    sent.put(os_pb2.ExecSandboxInput(start=first))
    events = w.stub.ExecSandboxInteractive(iter(sent.get, None), timeout=60)
    return events, sent


@check(guest=True)
def an_interactive_command_is_written_to_and_ends_with_its_input(w):
    first = os_pb2.ExecSandboxRequest(workspace_scope=scope(), sandbox="box", command=["cat"], stdin=b"one ")
    events, sent = converse(w, first)
    sent.put(os_pb2.ExecSandboxInput(stdin=b"two "))
    sent.put(os_pb2.ExecSandboxInput(stdin=b"three"))
    sent.put(None)
    events = list(events)
    equal(b"".join(e.stdout.data for e in events if e.HasField("stdout")), b"one two three")
    equal(events[-1].exit.exit_code, 0)


@check(guest=True)
def a_terminal_has_a_size_and_is_resized(w):
    script = "stty size; read line; stty size; read line"
    first = os_pb2.ExecSandboxRequest(
        workspace_scope=scope(), sandbox="box", command=["sh", "-c", script], tty=True, cols=91, rows=31
    )
    events, sent = converse(w, first)
    seen = b""
    for event in events:
        seen += event.stdout.data
        if b"31 91" in seen and not sent.qsize() and b"44 55" not in seen:
            sent.put(os_pb2.ExecSandboxInput(resize=os_pb2.ExecSandboxWindowResize(cols=55, rows=44)))
            sent.put(os_pb2.ExecSandboxInput(stdin=b"\n"))
            seen += b"(resized)"
        if b"44 55" in seen:
            sent.put(os_pb2.ExecSandboxInput(stdin=b"\n"))
            seen = seen.replace(b"44 55", b"(44x55)")
        if event.HasField("exit"):
            equal(event.exit.exit_code, 0)
    sent.put(None)
    assert b"(44x55)" in seen, seen


@check
def a_command_is_needed(w):
    with fails(Code.INVALID_ARGUMENT):
        list(w.stub.ExecSandbox(os_pb2.ExecSandboxRequest(workspace_scope=scope(), sandbox="box")))
    with fails(Code.INVALID_ARGUMENT):
        first = os_pb2.ExecSandboxInput(stdin=b"x")
        list(w.stub.ExecSandboxInteractive(iter([first]), timeout=30))


# --- services and connections


@check
def a_service_is_exposed_shown_listed_and_deleted(w):
    ask = os_pb2.ExposeServiceRequest(
        workspace_scope=scope(), sandbox="box", name="web", target_port=8080, request_id="expose-web"
    )
    made = w.stub.ExposeService(ask)
    equal(w.stub.ExposeService(ask), made)
    assert made.url.startswith("http://127.0.0.1:"), made.url
    equal((made.endpoint.sandbox_id, made.endpoint.name, made.endpoint.target_port), (w.box, "web", 8080))
    ask = os_pb2.GetServiceRequest(workspace_scope=scope(), sandbox="box", name="web")
    equal(w.stub.GetService(ask), made)
    for name, port in (("api", 8081), ("", 8080)):
        w.stub.ExposeService(
            os_pb2.ExposeServiceRequest(workspace_scope=scope(), sandbox="box", name=name, target_port=port)
        )
    ask = os_pb2.ListServicesRequest(workspace_scope=scope(), sandbox="box", page_size=2)
    page = w.stub.ListServices(ask)
    ask.page_token = page.next_page_token
    more = w.stub.ListServices(ask)
    equal([s.endpoint.name for p in (page, more) for s in p.services], ["", "api", "web"])
    gone = os_pb2.DeleteServiceRequest(workspace_scope=scope(), sandbox="box", name="api")
    equal(w.stub.DeleteService(gone).outcome, DeletionOutcome.COMPLETED)
    with fails(Code.NOT_FOUND, "SERVICE_NOT_FOUND"):
        w.stub.DeleteService(gone)
    gone.allow_missing = True
    equal(w.stub.DeleteService(gone).outcome, DeletionOutcome.ALREADY_ABSENT)


@check(guest=True)
def a_service_answers_at_its_address(w):
    script = "mkdir -p /tmp/www && echo page > /tmp/www/index.html && busybox httpd -p 127.0.0.1:8080 -h /tmp/www"
    equal(w.client.exec("box", ["sh", "-c", script], workspace=WORKSPACE).exit_code, 0)
    ask = os_pb2.GetServiceRequest(workspace_scope=scope(), sandbox="box", name="web")
    with urllib.request.urlopen(w.stub.GetService(ask).url, timeout=30) as answer:
        equal(answer.read(), b"page\n")


def forwarded(w, frames):
    events = w.stub.ForwardTcp(iter(frames), timeout=60)
    return b"".join(event.data for event in events)


@check(guest=True)
def a_connection_is_forwarded_with_a_session_until_it_is_revoked(w):
    session = w.stub.CreateSshSession(os_pb2.CreateSshSessionRequest(workspace_scope=scope(), sandbox="box"))
    equal(session.sandbox_id, w.box)
    assert session.token and session.gateway_scheme == "http", session
    equal(f"{session.gateway_host}:{session.gateway_port}", w.arguments.endpoint)
    assert session.expiration_time.seconds > time.time()
    init = os_pb2.TcpForwardInit(
        sandbox="box",
        workspace=WORKSPACE,
        tcp=os_pb2.TcpRelayTarget(host="127.0.0.1", port=8080),
        authorization_token=session.token,
    )
    request = b"GET /index.html HTTP/1.0\r\n\r\n"
    frames = [os_pb2.TcpForwardFrame(init=init), os_pb2.TcpForwardFrame(data=request)]
    assert forwarded(w, frames).endswith(b"page\n")
    revoke = os_pb2.RevokeSshSessionRequest(token=session.token)
    equal(w.stub.RevokeSshSession(revoke).outcome, DeletionOutcome.COMPLETED)
    with fails(Code.UNAUTHENTICATED, "SESSION_ENDED"):
        forwarded(w, frames)
    with fails(Code.NOT_FOUND):
        w.stub.RevokeSshSession(revoke)
    revoke.allow_missing = True
    equal(w.stub.RevokeSshSession(revoke).outcome, DeletionOutcome.ALREADY_ABSENT)


@check(guest=True)
def a_connection_to_nothing_is_refused_and_to_elsewhere_too(w):
    def to(host, port):
        tcp = os_pb2.TcpRelayTarget(host=host, port=port)
        return [os_pb2.TcpForwardFrame(init=os_pb2.TcpForwardInit(sandbox="box", workspace=WORKSPACE, tcp=tcp))]

    with fails(Code.FAILED_PRECONDITION, "PORT_CLOSED"):
        forwarded(w, to("localhost", 9))
    with fails(Code.INVALID_ARGUMENT):
        forwarded(w, to("192.0.2.1", 80))


# --- logs and watching


@check(guest=True)
def logs_have_lines_of_the_console(w):
    ask = os_pb2.GetSandboxLogsRequest(workspace_scope=scope(), sandbox="box", lines=5, sources=["console"])
    logs = w.stub.GetSandboxLogs(ask)
    assert 0 < len(logs.logs) <= 5 and logs.logs[0].sandbox_id == w.box, logs
    equal({(line.source, line.target) for line in logs.logs}, {("sandbox", "console")})


@check
def logs_of_the_gateway_tell_the_phases(w):
    ask = os_pb2.GetSandboxLogsRequest(workspace_scope=scope(), sandbox="box", sources=["gateway"])
    lines = w.stub.GetSandboxLogs(ask).logs
    assert any("Ready" in line.message and line.HasField("event_time") for line in lines), lines
    ask.since_time.GetCurrentTime()
    equal(len(w.stub.GetSandboxLogs(ask).logs), 0)
    with fails(Code.INVALID_ARGUMENT):
        w.stub.GetSandboxLogs(os_pb2.GetSandboxLogsRequest(workspace_scope=scope(), sandbox="box", sources=["moon"]))


@check
def a_watch_begins_with_what_is_and_stops_at_a_terminal_phase(w):
    events = list(watching(w, sandbox="box", follow_status=True, stop_on_terminal=True))
    equal([e.WhichOneof("payload") for e in events], ["sandbox"])
    equal(events[0].sandbox.metadata.id, w.box)
    assert events[0].cursor
    with fails(Code.INVALID_ARGUMENT):
        list(watching(w, sandbox="box", follow_status=True, resume_after_cursor="nonsense"))


@check
def a_watch_tells_events_of_the_past_and_of_now(w):
    events = watching(w, sandbox="box", follow_events=True, event_tail=2)
    first = [next(events), next(events)]
    equal([e.event.type for e in first], ["PhaseChanged"] * 2)
    equal(first[-1].event.reason, "Ready")
    assert first[-1].event.HasField("event_time")
    events.cancel()


@check(guest=True)
def a_watch_follows_logs(w):
    events = watching(w, sandbox="box", follow_logs=True, log_tail_lines=3, log_sources=["console"])
    kinds = []
    for event in events:
        kinds.append(event.WhichOneof("payload"))
        if "log" in kinds:
            break
    events.cancel()
    assert set(kinds) <= {"sandbox", "log"}, kinds
