//! A cluster in memory and drivers on state directories of their own.
#![allow(dead_code, reason = "each test program uses its part")]

use std::{path::PathBuf, sync::Arc, time::Duration};

use futures::StreamExt as _;
use serde_json::Value;
use torpor_driver_kubernetes::{KubernetesConfig, KubernetesDriver};
use torpor_proto::agent::v1::{ExecInput, ExecStart, agent_client::AgentClient, exec_input, exec_output};
use torpor_sandbox::{ComputeDriver, SandboxId, SandboxSpec};
use torpor_test_kube::{Behaviour, Generation, Server};

pub struct Bench {
    pub server: Server,
    pub config: KubernetesConfig,
    pub folder: tempfile::TempDir,
}

pub fn object(id: &SandboxId) -> String {
    format!("torpor-{id}")
}

pub fn claim(id: &SandboxId) -> String {
    format!("torpor-{id}-workspace")
}

/// What a command writes, and what it ends with; none: its stream ended without a word of it.
pub async fn exec(driver: &dyn ComputeDriver, id: &SandboxId, argv: &[&str]) -> (String, Option<i32>) {
    let mut client = AgentClient::new(driver.agent(id).await.unwrap());
    let argv = argv.iter().map(ToString::to_string).collect();
    let input = ExecInput { kind: Some(exec_input::Kind::Start(ExecStart { argv, ..ExecStart::default() })) };
    let requests = futures::stream::once(async { input }).chain(futures::stream::pending());
    let mut output = client.exec(requests).await.unwrap().into_inner();
    let (mut text, mut code) = (Vec::new(), None);
    while let Some(message) = output.message().await.unwrap() {
        match message.kind {
            Some(exec_output::Kind::Stdout(bytes)) => text.extend_from_slice(&bytes),
            Some(exec_output::Kind::Exit(exit)) => {
                code = Some(exit.code);
                break;
            }
            _ => {}
        }
    }
    (String::from_utf8(text).unwrap(), code)
}

impl Bench {
    pub async fn new(generation: Generation) -> (Self, Arc<KubernetesDriver>) {
        Self::with(generation, Behaviour::default(), |_| {}).await
    }

    pub async fn with(
        generation: Generation,
        behaviour: Behaviour,
        change: impl FnOnce(&mut KubernetesConfig),
    ) -> (Self, Arc<KubernetesDriver>) {
        let folder = tempfile::tempdir().unwrap();
        let server = Server::start(generation, behaviour).await.unwrap();
        grant(&server);
        let mut config = KubernetesConfig::new(folder.path().join("state"), "registry.test/torpor-agent:1");
        config.kubeconfig = Some(server.kubeconfig(folder.path()).unwrap());
        config.start_timeout = Duration::from_secs(20);
        change(&mut config);
        let driver = KubernetesDriver::new(config.clone()).await.unwrap();
        (Self { server, config, folder }, driver)
    }

    pub async fn driver(&self) -> Arc<KubernetesDriver> {
        KubernetesDriver::new(self.config.clone()).await.unwrap()
    }
}

/// The rules of deploy/kubernetes/rbac.yaml: those of a namespace of sandboxes, and those of the cluster.
pub fn rules() -> (Value, Value) {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/kubernetes/rbac.yaml");
    let text = std::fs::read_to_string(path).unwrap();
    let objects: Vec<Value> = text.split("\n---\n").map(|one| serde_saphyr::from_str(one).unwrap()).collect();
    let of = |name: &str| {
        let found = |object: &&Value| object["kind"] == "ClusterRole" && object["metadata"]["name"] == name;
        objects.iter().find(found).unwrap()["rules"].clone()
    };
    (of("torpor-sandboxes"), of("torpor-cluster"))
}

/// The cluster lets its client do what these say, and nothing else.
pub fn grant(server: &Server) {
    let (sandboxes, cluster) = rules();
    for namespace in [torpor_test_kube::NAMESPACE, "default"] {
        server.grant(Some(namespace), &sandboxes);
    }
    server.grant(None, &cluster);
}

/// As it is stored, so that what it doesn't say is as by default.
pub fn spec() -> SandboxSpec {
    let text = serde_json::json!({
        "driver": "kubernetes", "hostname": "web", "image": "registry.test/tiny:1",
        "image_digest": "registry.test/tiny:1", "environment": {"GREETING": "hello"},
        "resources": {"cpus": 1, "memory_bytes": 96 << 20, "disk_bytes": 1 << 30},
        "stop_grace": {"secs": 5, "nanos": 0},
    });
    serde_json::from_value(text).unwrap()
}

/// The real agent, where one was built.
pub fn agent(test: &str) -> Option<PathBuf> {
    let found = std::env::var_os("TORPOR_TEST_AGENT").map(PathBuf::from).filter(|path| path.is_file());
    if found.is_none() {
        let reason = "needs TORPOR_TEST_AGENT=PATH of a torpor-agent";
        let required = std::env::var("REQUIRE").unwrap_or_default();
        assert!(!required.split(',').any(|word| word == "tools"), "{test}: {reason}");
        let _ = std::io::Write::write_fmt(&mut std::io::stderr(), format_args!("SKIP {test}: {reason}\n"));
    }
    found
}

/// Looks until it is so.
pub async fn until(what: &str, mut test: impl AsyncFnMut() -> bool) {
    for _ in 0..400 {
        if test().await {
            return;
        }
        tokio::time::sleep(Duration::from_millis(25)).await;
    }
    panic!("it never came about: {what}");
}
