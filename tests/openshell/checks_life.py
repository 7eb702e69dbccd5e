"""Attachments, configuration, rest and waking, lists, sessions, and the end."""

import json
import os
import pathlib
import tempfile

from openshell import DeletionOutcome, Sandbox, SandboxError, ServiceAuthorizationMode, ServiceExposure
from openshell._proto import openshell_pb2 as os_pb2
from openshell._proto import sandbox_pb2

from harness import WORKSPACE, Code, check, equal, fails, scope, watching

# --- providers of a sandbox, and configuration


@check
def providers_are_attached_and_detached(w):
    ask = os_pb2.AttachSandboxProviderRequest(
        workspace_scope=scope(), sandbox="box", provider="z-last", request_id="attach-z"
    )
    first = w.stub.AttachSandboxProvider(ask)
    assert first.attached and w.stub.AttachSandboxProvider(ask).attached
    equal((first.receipt.kind, first.receipt.desired.sandbox_id), (os_pb2.PROVIDER_MUTATION_KIND_ATTACH, w.box))
    equal(sorted(first.sandbox.spec.providers), ["keys", "z-last"])
    ask.request_id = ""
    equal(w.stub.AttachSandboxProvider(ask).attached, False)
    ask.expected_resource_version = 1
    with fails(Code.ABORTED, "STALE_VERSION"):
        w.stub.AttachSandboxProvider(ask)
    shown = w.stub.ListSandboxProviders(os_pb2.ListSandboxProvidersRequest(workspace_scope=scope(), sandbox="box"))
    equal([p.metadata.name for p in shown.providers], ["keys", "z-last"])
    gone = os_pb2.DeleteProviderRequest(workspace_scope=scope(), name="z-last")
    with fails(Code.FAILED_PRECONDITION, "PROVIDER_IN_USE"):
        w.stub.DeleteProvider(gone)
    ask = os_pb2.DetachSandboxProviderRequest(workspace_scope=scope(), sandbox="box", provider="z-last")
    equal(w.stub.DetachSandboxProvider(ask).detached, True)
    equal(w.stub.DetachSandboxProvider(ask).detached, False)
    equal(w.stub.DeleteProvider(gone).outcome, DeletionOutcome.COMPLETED)
    with fails(Code.NOT_FOUND):
        w.stub.DeleteProvider(gone)


@check
def configuration_is_kept_and_given_back(w):
    read = lambda: w.stub.GetSandboxConfig(sandbox_pb2.GetSandboxConfigRequest(workspace_scope=scope(), name="box"))
    begun = read()
    equal((begun.version, begun.policy_source), (1, sandbox_pb2.POLICY_SOURCE_SANDBOX))
    equal(list(begun.policy.filesystem.read_only), ["/usr"])
    policy = sandbox_pb2.SandboxPolicy(version=1)
    policy.network_policies["web"].endpoints.add(host="example.org", port=443)
    ask = os_pb2.UpdateConfigRequest(workspace_scope=scope(), sandbox="box", policy=policy, annotations={"by": "test"})
    changed = w.stub.UpdateConfig(ask)
    equal((changed.version, dict(changed.annotations)), (2, {"by": "test"}))
    value = sandbox_pb2.SettingValue(int_value=7)
    w.stub.UpdateConfig(
        os_pb2.UpdateConfigRequest(workspace_scope=scope(), sandbox="box", setting_key="depth", setting_value=value)
    )
    now = read()
    equal((now.policy, now.policy_hash), (policy, changed.policy_hash))
    equal((now.settings["depth"].value, now.settings["depth"].scope), (value, sandbox_pb2.SETTING_SCOPE_SANDBOX))
    equal(w.get("box").status.current_policy_version, 2)
    ask.expected_resource_version = 1
    with fails(Code.ABORTED):
        w.stub.UpdateConfig(ask)
    with fails(Code.UNIMPLEMENTED):
        merge = os_pb2.PolicyMergeOperation(remove_rule=os_pb2.RemoveNetworkRule(rule_name="web"))
        w.stub.UpdateConfig(
            os_pb2.UpdateConfigRequest(workspace_scope=scope(), sandbox="box", merge_operations=[merge])
        )


@check
def settings_of_the_gateway_hold_for_every_sandbox(w):
    value = sandbox_pb2.SettingValue(string_value="all")
    ask = os_pb2.UpdateConfigRequest(setting_key="depth", setting_value=value)
    setattr(ask, "global", True)
    w.stub.UpdateConfig(ask)
    equal(w.stub.GetGatewayConfig(sandbox_pb2.GetGatewayConfigRequest()).settings["depth"], value)
    ask = sandbox_pb2.GetSandboxConfigRequest(workspace_scope=scope(), name="box")
    equal(w.stub.GetSandboxConfig(ask).settings["depth"].scope, sandbox_pb2.SETTING_SCOPE_GLOBAL)
    gone = os_pb2.UpdateConfigRequest(setting_key="depth", delete_setting=True)
    setattr(gone, "global", True)
    equal(w.stub.UpdateConfig(gone).deleted, True)
    equal(w.stub.GetSandboxConfig(ask).settings["depth"].scope, sandbox_pb2.SETTING_SCOPE_SANDBOX)


# --- rest and waking


@check
def stop_and_start_by_session_keep_the_sandbox(w):
    session = w.client.get_session("box", workspace=WORKSPACE)
    if not w.arguments.no_guest:
        session.exec(["sh", "-c", "echo kept > /root/file"])
    assert session.stop().phase in (os_pb2.SANDBOX_PHASE_STOPPING, os_pb2.SANDBOX_PHASE_STOPPED)
    stopped = w.client.wait_stopped("box", workspace=WORKSPACE)
    equal((stopped.id, stopped.phase), (w.box, os_pb2.SANDBOX_PHASE_STOPPED))
    assert all(c.type != "Suspended" for c in stopped.conditions), stopped.conditions


@check
def a_stopped_sandbox_runs_nothing_and_says_what_to_do(w):
    with fails(Code.FAILED_PRECONDITION, "STOPPED"):
        w.client.exec("box", ["true"], workspace=WORKSPACE)
    with fails(Code.FAILED_PRECONDITION, "STOPPED"):
        w.stub.CreateSshSession(os_pb2.CreateSshSessionRequest(workspace_scope=scope(), sandbox="box"))
    try:
        w.client.wait_ready("box", workspace=WORKSPACE, timeout_seconds=5)
    except SandboxError as error:
        assert "stopped" in str(error), error
    else:
        raise AssertionError("wait_ready did not end")


@check
def a_watch_goes_on_after_its_cursor_without_a_gap(w):
    at_rest = next(watching(w, sandbox="box", follow_status=True))
    equal(at_rest.sandbox.status.phase, os_pb2.SANDBOX_PHASE_STOPPED)
    seen = []
    events = watching(
        w, sandbox="box", follow_status=True, follow_events=True, resume_after_cursor=at_rest.cursor
    )
    ask = os_pb2.StartSandboxRequest(workspace_scope=scope(), name="box", request_id="start-one")
    w.stub.StartSandbox(ask)
    for event in events:
        if event.HasField("event"):
            seen.append(event.event.reason)
        if event.HasField("sandbox") and event.sandbox.status.phase == os_pb2.SANDBOX_PHASE_READY:
            break
    events.cancel()
    equal(seen, ["Starting", "Ready"])


@check
def a_start_asked_for_again_is_not_done_again(w):
    ready = w.client.wait_ready("box", workspace=WORKSPACE)
    equal(ready.id, w.box)
    ask = os_pb2.StartSandboxRequest(workspace_scope=scope(), name="box", request_id="start-one")
    w.client.stop("box", workspace=WORKSPACE)
    w.client.wait_stopped("box", workspace=WORKSPACE)
    equal(w.stub.StartSandbox(ask).sandbox.status.phase, os_pb2.SANDBOX_PHASE_STOPPED)


@check
def a_suspended_sandbox_shows_as_stopped_with_a_condition_and_start_resumes_it(w):
    w.client.start("box", workspace=WORKSPACE)
    w.client.wait_ready("box", workspace=WORKSPACE)
    w.torpor("suspend", "box")
    asleep = w.client.wait_stopped("box", workspace=WORKSPACE)
    found = [c for c in asleep.conditions if c.type == "Suspended"]
    equal([(c.status, c.reason) for c in found], [("True", "DiskRetained")])
    with fails(Code.FAILED_PRECONDITION, "SUSPENDED"):
        w.client.exec("box", ["true"], workspace=WORKSPACE)
    w.client.start("box", workspace=WORKSPACE)
    awake = w.client.wait_ready("box", workspace=WORKSPACE)
    equal((awake.id, [c for c in awake.conditions if c.type == "Suspended"]), (w.box, []))
    if not w.arguments.no_guest:
        equal(w.client.exec("box", ["cat", "/root/file"], workspace=WORKSPACE).stdout, "kept\n")


# --- templates, sessions, lists, the end


@check
def a_sandbox_is_made_from_a_template_with_services(w):
    # Small and never waited for.
    spec = os_pb2.SandboxSpec(environment={"BOTH": "request"})
    made = w.client.create_from_template(
        workspace=WORKSPACE,
        workload_template="small",
        spec=spec,
        name="from-template",
        service_exposures=[ServiceExposure(80, "web"), ServiceExposure(81, "", ServiceAuthorizationMode.BEARER_PASSTHROUGH)],
    )
    equal((made.created_from_workload_template.name, made.created_from_workload_template.resource_version), ("small", "1"))
    equal(sorted(made.service_urls), ["", "web"])
    assert all(url.startswith("http://127.0.0.1:") for url in made.service_urls.values()), made.service_urls
    shown = w.get("from-template")
    environment = {**shown.spec.template.environment, **shown.spec.environment}
    equal(environment, {"FROM": "template", "BOTH": "request"})
    w.client.delete("from-template", workspace=WORKSPACE)
    w.client.wait_deleted("from-template", workspace=WORKSPACE)


@check
def sandboxes_are_listed_in_pages_by_label_and_workspace(w):
    # Stopped at once: they need not come up.
    for name, workspace in (("one", WORKSPACE), ("two", WORKSPACE), ("one", "blue")):
        w.client.create(workspace=workspace, spec=w.spec(), name=name, labels={"batch": "7"})
        w.client.stop(name, workspace=workspace)
    names = lambda refs: [ref.name for ref in refs]
    pages = list(w.client.list(workspace=WORKSPACE, page_size=1, label_selector="batch=7"))
    # The last one may be empty: what comes after it is of another workspace.
    equal([names(page.items) for page in pages if page.items], [["one"], ["two"]])
    equal(names(w.client.list_all(workspace="blue")), ["one"])
    found = w.client.list_all_for_all_workspaces(page_size=1, label_selector="batch=7")
    equal([(ref.workspace, ref.name) for ref in found], [(WORKSPACE, "one"), (WORKSPACE, "two"), ("blue", "one")])
    equal(len(w.client.list_ids_for_all_workspaces(label_selector="batch=7")), 3)
    with fails(Code.INVALID_ARGUMENT):
        w.client.list_all(workspace=WORKSPACE, page_token="nonsense")
    with fails(Code.INVALID_ARGUMENT):
        w.client.list_all(workspace=WORKSPACE, page_size=100_000)
    with fails(Code.NOT_FOUND):
        w.client.list_all(workspace="no-such-workspace")


@check
def delete_is_bound_to_an_id_and_missing_may_be_allowed(w):
    one = w.client.get("one", workspace=WORKSPACE)
    ask = os_pb2.DeleteSandboxRequest(workspace_scope=scope(), name="one", request_id="delete-one")
    first = w.stub.DeleteSandbox(ask)
    assert first.outcome in (DeletionOutcome.COMPLETED, DeletionOutcome.ACCEPTED), first
    equal(first.sandbox_id, one.id)
    w.client.wait_deleted("one", workspace=WORKSPACE, expected_sandbox_id=one.id)
    equal(w.stub.DeleteSandbox(ask).outcome, DeletionOutcome.COMPLETED)
    with fails(Code.NOT_FOUND, "SANDBOX_NOT_FOUND"):
        w.client.delete("one", workspace=WORKSPACE)
    equal(w.client.delete("one", workspace=WORKSPACE, allow_missing=True).outcome, DeletionOutcome.ALREADY_ABSENT)
    for name, workspace in (("two", WORKSPACE), ("one", "blue")):
        w.client.delete(name, workspace=workspace)
        w.client.wait_deleted(name, workspace=workspace)


@check
def a_watch_ends_with_its_sandbox(w):
    made = w.client.create(workspace=WORKSPACE, spec=w.spec(), name="short-lived")
    events = watching(w, sandbox="short-lived", follow_status=True)
    equal(next(events).sandbox.metadata.id, made.id)
    w.client.delete("short-lived", workspace=WORKSPACE)
    phases = [event.sandbox.status.phase for event in events]
    equal(phases[-1], os_pb2.SANDBOX_PHASE_DELETING)


def active_cluster(w, folder):
    """The files by which the client finds a gateway."""
    gateway = pathlib.Path(folder) / "openshell/gateways/mine"
    gateway.mkdir(parents=True)
    (gateway / "metadata.json").write_text(json.dumps({"gateway_endpoint": f"http://{w.arguments.endpoint}"}))
    (gateway.parent.parent / "active_gateway").write_text("mine\n")
    os.environ["XDG_CONFIG_HOME"] = str(folder)


@check
def a_session_is_a_context_that_ends_with_its_sandbox(w):
    with tempfile.TemporaryDirectory() as folder:
        active_cluster(w, folder)
        with Sandbox(workspace=WORKSPACE, spec=w.spec(), name="context", labels={"a": "b"}) as session:
            equal(w.client.get("context", workspace=WORKSPACE).id, session.id)
            if not w.arguments.no_guest:
                equal(session.exec(["echo", "hello"]).stdout, "hello\n")
                equal(session.exec_python(lambda: 6 * 7).stdout, "42\n")
        with fails(Code.NOT_FOUND):
            w.client.get("context", workspace=WORKSPACE)


@check
def a_session_can_join_a_sandbox_and_leave_it(w):
    with tempfile.TemporaryDirectory() as folder:
        active_cluster(w, folder)
        with Sandbox(workspace=WORKSPACE, sandbox="box", delete_on_exit=False) as session:
            equal(session.id, w.box)
    equal(w.client.get("box", workspace=WORKSPACE).id, w.box)


@check
def a_workspace_with_sandboxes_is_not_deleted(w):
    w.client.create(workspace="blue", spec=w.spec(), name="holds")
    with fails(Code.FAILED_PRECONDITION):
        w.workspaces.delete("blue")
    w.client.delete("holds", workspace="blue")
    w.client.wait_deleted("holds", workspace="blue")
    equal(w.workspaces.delete("blue").outcome, DeletionOutcome.COMPLETED)


@check
def everything_else_is_unimplemented_with_a_reason(w):
    served = {
        "Health GetCurrentUser GetGatewayInfo CreateSandbox GetSandbox ListSandboxes CreateSandboxTemplate "
        "GetSandboxTemplate ListSandboxTemplates DeleteSandboxTemplate ListSandboxProviders AttachSandboxProvider "
        "DetachSandboxProvider DeleteSandbox StopSandbox StartSandbox CreateSshSession ExposeService GetService "
        "ListServices DeleteService RevokeSshSession ExecSandbox ForwardTcp ExecSandboxInteractive CreateProvider "
        "GetProvider ListProviders UpdateProvider DeleteProvider GetSandboxConfig GetGatewayConfig UpdateConfig "
        "GetSandboxLogs WatchSandbox CreateWorkspace GetWorkspace ListWorkspaces DeleteWorkspace AddWorkspaceMember "
        "RemoveWorkspaceMember ListWorkspaceMembers"
    }
    served = set(" ".join(served).split())
    methods = os_pb2.DESCRIPTOR.services_by_name["OpenShell"].methods_by_name
    equal(len(methods), 84)
    for name in sorted(set(methods) - served):
        call = w.channel.stream_stream(f"/openshell.v1.OpenShell/{name}")
        with fails(Code.UNIMPLEMENTED, "NOT_SERVED"):
            list(call(iter([b""]), timeout=30))
    with fails(Code.UNIMPLEMENTED):
        w.channel.unary_unary("/openshell.v1.OpenShell/NoSuchMethod")(b"", timeout=30)


@check
def the_sandbox_is_deleted_in_the_end(w):
    done = w.client.get_session("box", workspace=WORKSPACE).delete()
    equal(done.sandbox_id, w.box)
    w.client.wait_deleted("box", workspace=WORKSPACE, expected_sandbox_id=w.box)
    equal(w.client.list_ids(workspace=WORKSPACE), [])
