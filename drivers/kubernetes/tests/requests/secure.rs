//! The driver's own client over TLS, by a kubeconfig and by the files that a pod has.

use std::{fs, process::Stdio, time::Duration};

use torpor_driver_kubernetes::{KubernetesConfig, KubernetesDriver};
use torpor_sandbox::{ComputeDriver, DriverError, Keep, Observed, Run, SandboxId};
use torpor_test_kube::{Behaviour, Front, Generation, Server};

use crate::common::{grant, spec};

const GRACE: Duration = Duration::from_secs(5);

async fn cluster() -> (Server, Front) {
    let server = Server::start(Generation::Stable, Behaviour::default()).await.unwrap();
    grant(&server);
    let front = server.secure("secret").await.unwrap();
    (server, front)
}

/// From nothing to a sandbox that has run, slept and gone, with an exec to its agent.
async fn story(driver: &KubernetesDriver) {
    let id = SandboxId::generate();
    driver.create(&id, &spec(), Run(1)).await.unwrap();
    driver.start(&id, Keep::Disk, Run(1)).await.unwrap();
    assert_eq!(driver.observe(&id).await.unwrap(), Observed::Running { run: Run(1), agent: true });
    assert!(driver.stop(&id, Keep::Disk, GRACE).await.unwrap().flushed);
    driver.delete(&id).await.unwrap();
}

fn config(folder: &std::path::Path, url: &str, ca: &str, token: &str) -> KubernetesConfig {
    let (path, ca_path) = (folder.join("kubeconfig"), folder.join("ca.pem"));
    fs::write(&ca_path, ca).unwrap();
    let text = format!(
        "apiVersion: v1\nkind: Config\ncurrent-context: c\n\
         clusters: [{{name: c, cluster: {{server: \"{url}\", certificate-authority: \"{}\"}}}}]\n\
         users: [{{name: c, user: {{token: {token}}}}}]\n\
         contexts: [{{name: c, context: {{cluster: c, user: c, namespace: sandboxes}}}}]\n",
        ca_path.display()
    );
    fs::write(&path, text).unwrap();
    let mut config = KubernetesConfig::new(folder.join("state"), "registry.test/torpor-agent:1");
    config.kubeconfig = Some(path);
    config.start_timeout = Duration::from_secs(20);
    config
}

#[tokio::test]
async fn a_cluster_is_spoken_to_over_tls_with_its_ca_and_a_token() {
    let (server, front) = cluster().await;
    let folder = tempfile::tempdir().unwrap();
    let driver = KubernetesDriver::new(config(folder.path(), &front.url, &front.ca, "secret")).await.unwrap();
    story(&driver).await;
    assert!(server.counts().contains_key("exec pods"), "{:?}", server.counts());
    drop(driver);

    let create = async |ca: &str, token: &str| {
        let folder = tempfile::tempdir().unwrap();
        let driver = KubernetesDriver::new(config(folder.path(), &front.url, ca, token)).await.unwrap();
        driver.create(&SandboxId::generate(), &spec(), Run(1)).await.unwrap_err()
    };
    let unknown = create(&front.ca, "another").await;
    assert!(matches!(unknown, DriverError::Backend { .. }), "{unknown:?}");
    let (_other, others) = cluster().await;
    let strange = create(&others.ca, "secret").await;
    assert!(
        matches!(&strange, DriverError::Unreachable(text) if text.contains("certificate")),
        "{strange:?}"
    );
    assert!(server.names("sandboxes").is_empty());
}

/// Not a test by itself: what the next one starts where a pod's files are.
#[tokio::test]
async fn the_driver_in_a_pod() {
    if std::env::var_os("TORPOR_TEST_IN_POD").is_none() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let mut config = KubernetesConfig::new(folder.path().join("state"), "registry.test/torpor-agent:1");
    config.start_timeout = Duration::from_secs(20);
    let driver = KubernetesDriver::new(config).await.unwrap();
    story(&driver).await;
}

#[tokio::test]
async fn a_pods_own_account_and_the_clusters_variables_are_enough() {
    let test = "a_pods_own_account_and_the_clusters_variables_are_enough";
    if !is_root() {
        let required = std::env::var("REQUIRE").unwrap_or_default();
        assert!(!required.split(',').any(|word| word == "root"), "{test}: needs root");
        let _ = std::io::Write::write_fmt(&mut std::io::stderr(), format_args!("SKIP {test}: needs root\n"));
        return;
    }
    let (server, front) = cluster().await;
    let folder = tempfile::tempdir().unwrap();
    for (name, text) in [("ca.crt", front.ca.as_str()), ("token", "secret"), ("namespace", "sandboxes")] {
        fs::write(folder.path().join(name), text).unwrap();
    }
    // A mount namespace of its own: the machine's /run stays as it is.
    let script = "mount -t tmpfs none /run && mkdir -p /run/secrets/kubernetes.io && \
                  cp -r \"$FILES\" /run/secrets/kubernetes.io/serviceaccount && exec \"$@\"";
    let port = front.url.rsplit_once(':').unwrap().1;
    let done = tokio::process::Command::new("unshare")
        .args(["-m", "sh", "-c", script, "sh"])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "secure::the_driver_in_a_pod", "--nocapture"])
        .env("FILES", folder.path())
        .env("TORPOR_TEST_IN_POD", "1")
        .env("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        .env("KUBERNETES_SERVICE_PORT", port)
        .env("HOME", folder.path())
        .env_remove("KUBECONFIG")
        .stdin(Stdio::null())
        .output()
        .await
        .unwrap();
    let said = format!("{}{}", String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
    assert!(done.status.success() && said.contains("1 passed"), "{said}");
    assert!(server.counts().contains_key("exec pods"), "{:?}", server.counts());
    assert!(server.asked().iter().all(|asked| asked.code != 401));
}

/// Whether this process may do what root may.
fn is_root() -> bool {
    fs::read_to_string("/proc/self/status").is_ok_and(|text| {
        text.lines().any(|line| {
            line.strip_prefix("Uid:").is_some_and(|ids| ids.split_whitespace().nth(1) == Some("0"))
        })
    })
}
