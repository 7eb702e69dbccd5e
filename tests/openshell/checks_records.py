"""The gateway, workspaces, templates, providers, sandboxes as records, and rights."""

import json
import os
import urllib.request

from google.protobuf import duration_pb2
from openshell import DeletionOutcome, SandboxClient, ServiceExposure, WorkspaceClient
from openshell._proto import datamodel_pb2 as dm
from openshell._proto import openshell_pb2 as os_pb2
from openshell._proto import openshell_pb2_grpc
from openshell._proto import sandbox_pb2

from harness import WORKSPACE, Code, check, equal, fails, scope

# --- the gateway


@check
def the_unix_socket_works_by_a_name_without_a_slash(world):
    # A path becomes an authority with percent signs, which HTTP/2 libraries refuse.
    folder, name = os.path.split(os.environ["TORPOR_ENDPOINT"].removeprefix("unix://"))
    before = os.getcwd()
    os.chdir(folder)
    try:
        client = SandboxClient(f"unix:{name}", timeout=30.0)
        assert client.health().status == os_pb2.SERVICE_STATUS_HEALTHY
        client.close()
    finally:
        os.chdir(before)


@check
def health_answers_healthy_with_a_version(w):
    answer = w.client.health()
    equal(answer.status, os_pb2.SERVICE_STATUS_HEALTHY)
    assert answer.version


@check
def gateway_info_names_its_drivers(w):
    info = w.stub.GetGatewayInfo(os_pb2.GetGatewayInfoRequest())
    assert info.compute_drivers and info.compute_drivers[0].capabilities.driver_name, info
    assert info.compute_drivers[0].capabilities.resource_capabilities.memory.limit_supported


@check
def the_current_user_is_told_who_it_is(w):
    user = w.stub.GetCurrentUser(os_pb2.GetCurrentUserRequest())
    assert user.subject and user.identity_provider and "admin" in user.roles, user


@check
def the_unix_socket_serves_the_same_client(w):
    socket = os.environ["TORPOR_ENDPOINT"]
    assert socket.startswith("unix:///"), socket
    for endpoint in (socket, "unix:" + socket.removeprefix("unix://")):
        with SandboxClient(endpoint, timeout=60.0) as client:
            equal(client.health().status, os_pb2.SERVICE_STATUS_HEALTHY)
            # A second call refers to what the first one has put into the connection's table of headers.
            for _ in range(3):
                client.list_all(workspace=WORKSPACE)
            user = openshell_pb2_grpc.OpenShellStub(client._channel).GetCurrentUser(os_pb2.GetCurrentUserRequest())
            equal(user.subject, f"uid:{os.geteuid()}")


# --- workspaces


@check
def a_workspace_is_made_shown_and_listed(w):
    made = w.workspaces.create("blue", labels={"team": "a"})
    equal((made.name, made.phase, made.labels), ("blue", "WORKSPACE_PHASE_ACTIVE", {"team": "a"}))
    equal(w.workspaces.get("blue"), made)
    names = [found.name for found in w.workspaces.list_all(label_selector="team=a")]
    equal(names, ["blue"])


@check
def a_workspace_name_is_taken_once(w):
    with fails(Code.ALREADY_EXISTS):
        w.workspaces.create("blue")
    with fails(Code.INVALID_ARGUMENT):
        w.workspaces.create("Not A Name")


@check
def a_workspace_asked_for_again_by_request_id_is_the_same(w):
    ask = os_pb2.CreateWorkspaceRequest(name="green", request_id="make-green")
    first, again = w.stub.CreateWorkspace(ask), w.stub.CreateWorkspace(ask)
    equal(again.workspace, first.workspace)


@check
def workspaces_come_in_pages(w):
    pages = list(w.workspaces.list(page_size=1))
    assert len(pages) >= 3 and all(len(page.items) == 1 for page in pages), pages
    names = [page.items[0].name for page in pages]
    equal(sorted(names), sorted(set(names)))


@check
def a_workspace_is_deleted_once_and_missing_may_be_allowed(w):
    equal(w.workspaces.delete("green").outcome, DeletionOutcome.COMPLETED)
    equal(w.workspaces.delete("green", allow_missing=True).outcome, DeletionOutcome.ALREADY_ABSENT)
    with fails(Code.NOT_FOUND):
        w.workspaces.delete("green")
    with fails(Code.NOT_FOUND):
        w.workspaces.get("green")


@check
def the_default_workspace_stays(w):
    with fails(Code.FAILED_PRECONDITION):
        w.workspaces.delete("default")


@check
def members_are_added_listed_and_removed(w):
    add = os_pb2.AddWorkspaceMemberRequest(
        workspace_scope=scope("blue"), principal_subject="uid:4242", role=os_pb2.WORKSPACE_ROLE_ADMIN
    )
    equal(w.stub.AddWorkspaceMember(add).member.role, os_pb2.WORKSPACE_ROLE_ADMIN)
    add.role, add.principal_subject = os_pb2.WORKSPACE_ROLE_USER, "uid:4243"
    w.stub.AddWorkspaceMember(add)
    ask = os_pb2.ListWorkspaceMembersRequest(workspace_scope=scope("blue"), page_size=1)
    page = w.stub.ListWorkspaceMembers(ask)
    ask.page_token = page.next_page_token
    more = w.stub.ListWorkspaceMembers(ask)
    equal([m.principal_subject for p in (page, more) for m in p.members], ["uid:4242", "uid:4243"])
    remove = os_pb2.RemoveWorkspaceMemberRequest(workspace_scope=scope("blue"), principal_subject="uid:4243")
    equal(w.stub.RemoveWorkspaceMember(remove).outcome, DeletionOutcome.COMPLETED)
    with fails(Code.NOT_FOUND):
        w.stub.RemoveWorkspaceMember(remove)
    remove.allow_missing = True
    equal(w.stub.RemoveWorkspaceMember(remove).outcome, DeletionOutcome.ALREADY_ABSENT)


# --- templates


@check
def a_template_comes_back_as_it_was_sent(w):
    template = os_pb2.SandboxWorkloadTemplate()
    template.metadata.name = "small"
    template.metadata.labels["size"] = "s"
    template.metadata.annotations["note"] = "any text, even = and /"
    if w.arguments.image:
        template.spec.workload.image = w.arguments.image
    template.spec.workload.environment["FROM"] = "template"
    template.spec.workload.environment["BOTH"] = "template"
    template.spec.workload.resources.cpu = "500m"
    template.spec.workload.resources.memory = "128Mi"
    template.spec.desired_service_level.startup.ready_within.CopyFrom(duration_pb2.Duration(seconds=3))
    template.spec.driver_config.update({"elsewhere": {"x": [1, True, "y"]}})
    made = w.templates.create(workspace=WORKSPACE, template=template)
    equal(made.spec, template.spec)
    equal(dict(made.metadata.labels), {"size": "s"})
    equal(made.metadata.workspace, WORKSPACE)
    equal(w.templates.get("small", workspace=WORKSPACE), made)


@check
def a_template_is_built_from_parts(w):
    made = w.templates.create(workspace="blue", name="other", labels={"size": "m"}, environment={"A": "1"}, cpu="1")
    equal(made.spec.workload.resources.cpu, "1")
    with fails(Code.ALREADY_EXISTS):
        w.templates.create(workspace="blue", name="other")
    with fails(Code.NOT_FOUND):
        w.templates.get("other", workspace=WORKSPACE)


@check
def templates_are_listed_by_label_page_and_workspace(w):
    w.templates.create(workspace=WORKSPACE, name="third")
    names = lambda templates: [t.metadata.name for t in templates]
    equal(names(w.templates.list_all(workspace=WORKSPACE, page_size=1)), ["small", "third"])
    equal(names(w.templates.list_all(workspace=WORKSPACE, label_selector="size=s")), ["small"])
    found = w.templates.list_all_for_all_workspaces(page_size=1)
    equal(sorted(names(found)), ["other", "small", "third"])


@check
def a_template_with_a_bad_size_is_refused_by_its_field(w):
    with fails(Code.INVALID_ARGUMENT, "INVALID_ARGUMENT"):
        w.templates.create(workspace=WORKSPACE, name="bad", memory="lots")
    with fails(Code.INVALID_ARGUMENT):
        w.templates.create(workspace=WORKSPACE, name="bad", cpu="-1")


@check
def a_template_is_deleted_and_missing_may_be_allowed(w):
    equal(w.templates.delete("third", workspace=WORKSPACE).outcome, DeletionOutcome.COMPLETED)
    equal(w.templates.delete("third", workspace=WORKSPACE, allow_missing=True).outcome, DeletionOutcome.ALREADY_ABSENT)
    with fails(Code.NOT_FOUND):
        w.templates.delete("third", workspace=WORKSPACE)


# --- providers


def provider(name, **fields):
    return dm.Provider(metadata=dm.ObjectMeta(name=name, labels={"p": "1"}), type="generic", **fields)


@check
def a_provider_is_kept_and_its_credentials_never_come_back(w):
    made = w.stub.CreateProvider(
        os_pb2.CreateProviderRequest(
            workspace_scope=scope(),
            provider=provider("keys", credentials={"TOKEN": "top-secret", "OLD": "x"}, config={"url": "http://a"}),
        )
    )
    shown = w.stub.GetProvider(os_pb2.GetProviderRequest(workspace_scope=scope(), name="keys"))
    equal(shown.provider, made.provider)
    assert b"top-secret" not in made.SerializeToString() + shown.SerializeToString()
    equal(sorted(shown.provider.credentials), ["OLD", "TOKEN"])
    equal(dict(shown.provider.config), {"url": "http://a"})
    with fails(Code.ALREADY_EXISTS, "PROVIDER_TAKEN"):
        w.stub.CreateProvider(os_pb2.CreateProviderRequest(workspace_scope=scope(), provider=provider("keys")))


@check
def a_provider_changes_by_what_is_named_and_a_stale_one_is_refused(w):
    change = dm.Provider(metadata=dm.ObjectMeta(name="keys"), credentials={"OLD": ""}, config={"region": "eu"})
    ask = os_pb2.UpdateProviderRequest(workspace_scope=scope(), provider=change)
    after = w.stub.UpdateProvider(ask).provider
    equal(sorted(after.credentials), ["TOKEN"])
    equal(dict(after.config), {"url": "http://a", "region": "eu"})
    equal(after.metadata.resource_version, 2)
    change.metadata.resource_version = 1
    with fails(Code.ABORTED, "STALE_VERSION"):
        w.stub.UpdateProvider(os_pb2.UpdateProviderRequest(workspace_scope=scope(), provider=change))


@check
def providers_come_in_pages_and_by_label(w):
    for name in ("a-first", "z-last"):
        ask = os_pb2.CreateProviderRequest(workspace_scope=scope(), provider=provider(name), request_id=f"p-{name}")
        equal(w.stub.CreateProvider(ask), w.stub.CreateProvider(ask))
    names, token = [], ""
    while True:
        ask = os_pb2.ListProvidersRequest(workspace_scope=scope(), page_size=1, page_token=token, label_selector="p=1")
        page = w.stub.ListProviders(ask)
        names += [found.metadata.name for found in page.providers]
        token = page.next_page_token
        if not token:
            break
    equal(names, ["a-first", "keys", "z-last"])


@check
def credentials_are_not_exported(w):
    with fails(Code.UNIMPLEMENTED, "NOT_SERVED"):
        w.client.providers().get_credentials("keys", ["TOKEN"], workspace=WORKSPACE)


# --- sandboxes at rest of words


@check
def a_sandbox_is_created_with_everything_it_was_sent(w):
    spec = w.spec(log_level="debug", tty=True, providers=["keys"], environment={"GREETING": "hi there"})
    spec.policy.version = 1
    spec.policy.filesystem.read_only.append("/usr")
    spec.template.annotations["x"] = "y"
    spec.template.resources.update({"limits": {"cpu": "1", "memory": "192Mi"}})
    ask = os_pb2.CreateSandboxRequest(
        workspace_scope=scope(),
        spec=spec,
        name="box",
        labels={"kind": "main"},
        annotations={"note": "kept"},
        request_id="make-box",
    )
    made = w.stub.CreateSandbox(ask).sandbox
    again = w.stub.CreateSandbox(ask).sandbox
    equal(again.metadata.id, made.metadata.id)
    w.box = made.metadata.id
    equal((made.metadata.name, made.metadata.workspace), ("box", WORKSPACE))
    equal(dict(made.metadata.labels), {"kind": "main"})
    equal(dict(made.metadata.annotations), {"note": "kept"})
    back = made.spec
    if not w.arguments.image:
        back.template.image = ""
    equal(back, spec)
    equal(made.status.current_policy_version, 1)


@check
def what_would_be_left_out_is_refused(w):
    for field, value, code in (
        ("runtime_class_name", "kata", Code.UNIMPLEMENTED),
        ("user_namespaces", True, Code.UNIMPLEMENTED),
        ("resources", {"limits": {"nvidia.com/gpu": "1"}}, Code.FAILED_PRECONDITION),
        ("resources", {"requests": {"ephemeral-storage": "1Gi"}}, Code.INVALID_ARGUMENT),
    ):
        spec = w.spec()
        if field == "resources":
            spec.template.resources.update(value)
        else:
            setattr(spec.template, field, value)
        with fails(code):
            w.client.create(workspace=WORKSPACE, spec=spec, name="none")
    with fails(Code.NOT_FOUND):
        w.get("none")


@check
def a_terminal_of_the_main_command_is_one_of_ours(w):
    made = w.client.create(workspace=WORKSPACE, spec=w.spec(command=["sh"], tty=True), name="terminal")
    with urllib.request.urlopen(f"http://{w.arguments.endpoint}/v1/sandboxes/terminal", timeout=60) as answer:
        assert json.load(answer)["spec"]["tty"] is True
    w.client.delete("terminal", workspace=WORKSPACE)
    w.client.wait_deleted("terminal", workspace=WORKSPACE, expected_sandbox_id=made.id)


@check
def a_request_id_is_good_for_one_request(w):
    ask = os_pb2.CreateSandboxRequest(workspace_scope=scope(), spec=w.spec(), name="box-two", request_id="make-box")
    with fails(Code.INVALID_ARGUMENT, "REQUEST_ID_REUSED"):
        w.stub.CreateSandbox(ask)


@check
def a_name_is_taken_once_and_bad_ones_are_refused(w):
    with fails(Code.ALREADY_EXISTS, "NAME_TAKEN"):
        w.client.create(workspace=WORKSPACE, spec=w.spec(), name="box")
    for name in ("Box", "a b", "../x", "other/box", "x" * 300):
        with fails(Code.INVALID_ARGUMENT):
            w.client.create(workspace=WORKSPACE, spec=w.spec(), name=name)


@check
def what_cannot_be_is_refused_before_anything_is_made(w):
    before = w.client.list_ids(workspace=WORKSPACE)
    gpu = w.spec()
    gpu.resource_requirements.gpu.count = 1
    with fails(Code.FAILED_PRECONDITION, "GPU_NOT_SUPPORTED"):
        w.client.create(workspace=WORKSPACE, spec=gpu)
    with fails(Code.NOT_FOUND, "PROVIDER_NOT_FOUND"):
        w.client.create(workspace=WORKSPACE, spec=w.spec(providers=["nobody"]))
    with fails(Code.NOT_FOUND):
        w.client.create(workspace="no-such-workspace", spec=w.spec())
    with fails(Code.NOT_FOUND):
        w.client.create_from_template(workspace=WORKSPACE, workload_template="no-such-template")
    with fails(Code.INVALID_ARGUMENT):
        w.client.create(workspace=WORKSPACE, spec=w.spec(), service_exposures=[ServiceExposure(70000)])
    with fails(Code.INVALID_ARGUMENT):
        w.client.create(workspace=WORKSPACE, spec=w.spec(environment={"A=B": "x"}))
    with fails(Code.UNIMPLEMENTED):
        ask = os_pb2.CreateSandboxRequest(workspace_scope=scope(), await_main_process_attachment=True)
        w.stub.CreateSandbox(ask)
    equal(w.client.list_ids(workspace=WORKSPACE), before)


@check
def wait_ready_returns_the_ready_sandbox(w):
    ready = w.client.wait_ready("box", workspace=WORKSPACE)
    equal((ready.id, ready.phase), (w.box, os_pb2.SANDBOX_PHASE_READY))
    assert any(c.type == "Ready" and c.status == "True" for c in ready.conditions), ready.conditions
    equal(w.client.get(w.box, workspace=WORKSPACE).name, "box")


@check
def sandboxes_of_other_workspaces_are_not_seen(w):
    with fails(Code.NOT_FOUND):
        w.client.get("box", workspace="blue")
    with fails(Code.NOT_FOUND):
        w.client.get(w.box, workspace="blue")
    for name in ("default/box", "../default/box", "box\0", "x" * 5000):
        with fails(Code.NOT_FOUND):
            w.client.get(name, workspace="blue")
    with fails(Code.INVALID_ARGUMENT):
        w.client.get("", workspace=WORKSPACE)


# --- rights


def as_somebody(w, name, *words):
    """A client with a token of its own."""
    secret = json.loads(w.torpor("token", "create", name, *words, "-o", "json"))["secret"]
    return SandboxClient(w.arguments.endpoint, bearer_token=secret, timeout=60.0)


@check
def a_viewer_sees_and_an_editor_does(w):
    with as_somebody(w, "see", "--role", "viewer") as viewer:
        equal(viewer.get("box", workspace=WORKSPACE).id, w.box)
        equal(viewer.list_ids(workspace=WORKSPACE), [w.box])
        for refused in (
            lambda: viewer.stop("box", workspace=WORKSPACE),
            lambda: viewer.exec("box", ["true"], workspace=WORKSPACE),
            lambda: viewer.create(workspace=WORKSPACE, spec=w.spec()),
            lambda: viewer.sandbox_templates().delete("small", workspace=WORKSPACE),
        ):
            with fails(Code.PERMISSION_DENIED):
                refused()
    with as_somebody(w, "do", "--role", "editor") as editor:
        equal(editor.delete("nothing", workspace=WORKSPACE, allow_missing=True).outcome, DeletionOutcome.ALREADY_ABSENT)
        with fails(Code.PERMISSION_DENIED):
            WorkspaceClient.from_sandbox_client(editor).create("mine")
        with fails(Code.PERMISSION_DENIED):
            ask = os_pb2.UpdateConfigRequest(setting_key="a", setting_value=sandbox_pb2.SettingValue(int_value=1))
            setattr(ask, "global", True)
            editor._stub.UpdateConfig(ask)


@check
def who_belongs_elsewhere_finds_nothing(w):
    with as_somebody(w, "other", "--role", "owner", "--workspace", "blue") as other:
        equal(other.list_ids(workspace="blue"), [])
        for name in ("box", w.box):
            with fails(Code.NOT_FOUND):
                other.get(name, workspace=WORKSPACE)
        for name in ("box", w.box, "default/box"):
            with fails(Code.NOT_FOUND):
                other.stop(name, workspace="blue")
        with fails(Code.NOT_FOUND):
            other.list_all(workspace=WORKSPACE)
        equal(other.list_all_for_all_workspaces(), [])
        with fails(Code.NOT_FOUND):
            other._stub.GetProvider(os_pb2.GetProviderRequest(workspace_scope=scope(), name="keys"))
    with SandboxClient(w.arguments.endpoint, bearer_token="tpr_x_y", timeout=60.0) as nobody:
        with fails(Code.UNAUTHENTICATED):
            nobody.list_all(workspace=WORKSPACE)
