"""What the checks of conformance.py share."""

import contextlib
import subprocess

import grpc
from openshell import GatewayError, SandboxClient, WorkspaceClient
from openshell._proto import datamodel_pb2 as dm
from openshell._proto import openshell_pb2 as os_pb2
from openshell._proto import openshell_pb2_grpc

WORKSPACE = "default"
CHECKS = []
Code = grpc.StatusCode


def check(function=None, *, guest=False):
    """Registers a check; its name is the function's."""

    def register(function):
        CHECKS.append((function.__name__.replace("_", " "), function, guest))
        return function

    return register(function) if function else register


class World:
    """What the checks share."""

    def __init__(self, arguments):
        self.arguments = arguments
        self.client = SandboxClient(arguments.endpoint, timeout=60.0)
        self.channel = grpc.insecure_channel(arguments.endpoint)
        self.stub = openshell_pb2_grpc.OpenShellStub(self.channel)
        self.templates = self.client.sandbox_templates()
        self.workspaces = WorkspaceClient.from_sandbox_client(self.client)
        self.box = None

    def spec(self, **fields):
        spec = os_pb2.SandboxSpec(**fields)
        if self.arguments.image:
            spec.template.image = self.arguments.image
        return spec

    def torpor(self, *words):
        done = subprocess.run(
            [self.arguments.torpor, *words], capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, f"torpor {words}: {done.stderr}"
        return done.stdout

    def get(self, name, workspace=WORKSPACE):
        return self.stub.GetSandbox(os_pb2.GetSandboxRequest(name=name, workspace_scope=scope(workspace))).sandbox


def scope(workspace=WORKSPACE):
    return dm.WorkspaceSelector(workspace=workspace)


@contextlib.contextmanager
def fails(code, reason=None):
    """The block must end in this status; with this reason, when one is given."""
    try:
        yield
    except grpc.RpcError as error:
        assert error.code() == code, f"{error.code()} instead of {code}: {error.details()}"
        if reason:
            info = GatewayError(error).error_info if not isinstance(error, GatewayError) else error.error_info
            assert info is not None, "no google.rpc.ErrorInfo"
            assert info.domain == "torpor", info.domain
            assert info.reason == reason, f"{info.reason} instead of {reason}"
    else:
        raise AssertionError(f"it succeeded instead of failing with {code}")


def equal(found, wanted):
    assert found == wanted, f"{found!r} instead of {wanted!r}"


def watching(w, **fields):
    return w.stub.WatchSandbox(os_pb2.WatchSandboxRequest(workspace_scope=scope(), **fields), timeout=60)
