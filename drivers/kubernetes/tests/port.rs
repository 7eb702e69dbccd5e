//! Agents on ports of their own: once by exec for each run, then by mutual TLS; and by exec whenever that doesn't work.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use std::{
    fs,
    net::{SocketAddr, TcpListener},
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use common::{Bench, object, spec, until};
use futures::StreamExt as _;
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose as Usage, IsCa,
    Issuer, KeyPair, date_time_ymd,
};
use serde_json::json;
use tokio_rustls::{
    TlsConnector,
    rustls::{
        ClientConfig, RootCertStore,
        crypto::ring,
        pki_types::{CertificateDer, ServerName, pem::PemObject as _},
        version::TLS13,
    },
};
use torpor_driver_kubernetes::{AgentLink, KubernetesDriver, diagnose};
use torpor_proto::agent::v1::{
    EnrollRequest, FileEnd, FileEntry, FileKind, UploadEnd, UploadInput, UploadStart,
    agent_client::AgentClient, upload_input, upload_result,
};
use torpor_sandbox::{
    Change, ComputeDriver, DriverError, Ended, Exit, Keep, Level, Observed, Run, SandboxId, SandboxSpec,
    spec::Endpoint,
};
use torpor_test_kube::{Behaviour, Generation};

const GRACE: Duration = Duration::from_secs(5);
const AGENT: Observed = Observed::Running { run: Run(1), agent: true };

/// A cluster whose pods are processes of this machine; none without an agent to run.
async fn bench(test: &str, pod_ips: &[&str]) -> Option<(Bench, Arc<KubernetesDriver>)> {
    let agent = common::agent(test)?;
    let pod_ips = pod_ips.iter().map(|ip| (*ip).to_owned()).collect();
    let behaviour = Behaviour { agent: Some(agent), pod_ips, ..Behaviour::default() };
    Some(with(behaviour).await)
}

async fn with(behaviour: Behaviour) -> (Bench, Arc<KubernetesDriver>) {
    Bench::with(Generation::Stable, behaviour, |config| {
        config.agent_link = AgentLink::Mtls;
        config.dial_pause = Duration::from_millis(200);
    })
    .await
}

async fn ready(driver: &dyn ComputeDriver, spec: &SandboxSpec) -> SandboxId {
    let id = SandboxId::generate();
    driver.create(&id, spec, Run(1)).await.unwrap();
    driver.start(&id, Keep::Disk, Run(1)).await.unwrap();
    id
}

fn links(driver: &dyn ComputeDriver) -> [usize; 2] {
    let all = driver.agent_links();
    assert_eq!([all[0].0, all[1].0], ["exec", "mtls"]);
    [all[0].1, all[1].1]
}

async fn by_port(driver: &dyn ComputeDriver, count: usize) {
    until("reached on their own ports", async || links(driver) == [0, count]).await;
}

fn execs(bench: &Bench) -> u64 {
    bench.server.counts().get("exec pods").copied().unwrap_or_default()
}

/// What a script writes.
async fn run(driver: &dyn ComputeDriver, id: &SandboxId, script: &str) -> String {
    common::exec(driver, id, &["/bin/sh", "-c", script]).await.0
}

/// As `torpor cp` does it; the path of the copy.
async fn copy(driver: &dyn ComputeDriver, id: &SandboxId, folder: &Path, data: Vec<u8>) -> PathBuf {
    use upload_input::Kind;
    let path = folder.to_str().unwrap().to_owned();
    let entry = FileEntry {
        path: "copy".into(),
        kind: FileKind::File.into(),
        mode: 0o600,
        size: Some(data.len() as u64),
        ..FileEntry::default()
    };
    let mut all = vec![Kind::Start(UploadStart { path, ..UploadStart::default() }), Kind::Entry(entry)];
    all.extend(data.chunks(64 << 10).map(|part| Kind::Data(part.to_vec().into())));
    all.extend([Kind::FileEnd(FileEnd {}), Kind::End(UploadEnd {})]);
    let all = futures::stream::iter(all.into_iter().map(|kind| UploadInput { kind: Some(kind) }));
    let mut client = AgentClient::new(driver.agent(id).await.unwrap());
    let done = client.upload(all).await.unwrap().into_inner().kind;
    assert!(matches!(done, Some(upload_result::Kind::Done(_))), "{done:?}");
    folder.join("copy")
}

fn seconds(offset: i64) -> Duration {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs() as i64;
    Duration::from_secs((now + offset) as u64)
}

fn authority_params(name: &str) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params
}

/// Has the agent of a sandbox take other credentials than those that it has, as its own user could.
async fn enroll(
    bench: &Bench,
    driver: &dyn ComputeDriver,
    id: &SandboxId,
    authority: Vec<u8>,
    server: (Vec<u8>, KeyPair),
) {
    let pod = bench.server.object("pods", &object(id)).unwrap();
    let request = EnrollRequest {
        run: 1,
        certificate: server.0.into(),
        key: server.1.serialize_der().into(),
        authority: authority.into(),
        host_name: "gateway.agents.torpor.internal".to_owned(),
        addresses: vec![pod["status"]["podIP"].as_str().unwrap().to_owned()],
        port: bench.config.agent_port.into(),
    };
    let mut client = AgentClient::new(driver.agent(id).await.unwrap());
    client.enroll(request).await.unwrap();
}

fn server_params(bench: &Bench, id: &SandboxId) -> CertificateParams {
    let pod = bench.server.object("pods", &object(id)).unwrap();
    let name = format!("{}.{id}.agents.torpor.internal", pod["metadata"]["uid"].as_str().unwrap());
    let mut params = CertificateParams::new(vec![name]).unwrap();
    params.extended_key_usages = vec![Usage::ServerAuth];
    params
}

/// The gateway's own, as its state directory has it.
fn authority(bench: &Bench) -> (Issuer<'static, KeyPair>, Vec<u8>) {
    let file = |name: &str| fs::read_to_string(bench.config.state_dir.join("kubernetes").join(name)).unwrap();
    let (kept, name) = (file("agents-ca.pem"), format!("agents of torpor {}", file("identity").trim()));
    let certificate = CertificateDer::from_pem_slice(kept.as_bytes()).unwrap();
    (Issuer::new(authority_params(&name), KeyPair::from_pem(&kept).unwrap()), certificate.to_vec())
}

fn signed(params: CertificateParams, issuer: &Issuer<'_, KeyPair>) -> (Vec<u8>, KeyPair) {
    let key = KeyPair::generate().unwrap();
    (params.signed_by(&key, issuer).unwrap().der().to_vec(), key)
}

/// Until when the certificate holds that an agent shows to everybody, seconds from now.
async fn shown(bench: &Bench, id: &SandboxId, authority: &[u8]) -> i64 {
    let pod = bench.server.object("pods", &object(id)).unwrap();
    let address = (pod["status"]["podIP"].as_str().unwrap(), bench.config.agent_port);
    let name = format!("{}.{id}.agents.torpor.internal", pod["metadata"]["uid"].as_str().unwrap());
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from(authority.to_vec())).unwrap();
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_protocol_versions(&[&TLS13])
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let stream = tokio::net::TcpStream::connect(address).await.unwrap();
    let name = ServerName::try_from(name).unwrap();
    let stream = TlsConnector::from(Arc::new(config)).connect(name, stream).await.unwrap();
    let certificate = stream.get_ref().1.peer_certificates().unwrap()[0].clone();
    let (_, read) = x509_parser::parse_x509_certificate(&certificate).unwrap();
    read.validity().not_after.timestamp() - seconds(0).as_secs() as i64
}

#[tokio::test]
async fn a_certificate_that_ends_soon_is_replaced_over_the_port_itself() {
    let test = "a_certificate_that_ends_soon_is_replaced_over_the_port_itself";
    let Some((bench, driver)) = bench(test, &[]).await else { return };
    let id = ready(&*driver, &spec()).await;
    by_port(&*driver, 1).await;
    let (ours, ca) = authority(&bench);
    let day = 24 * 3600;
    assert!(shown(&bench, &id, &ca).await > 80 * day);
    let mut short = server_params(&bench, &id);
    (short.not_before, short.not_after) =
        (date_time_ymd(1970, 1, 1) + seconds(-day), date_time_ymd(1970, 1, 1) + seconds(10 * day));
    enroll(&bench, &*driver, &id, ca.clone(), signed(short, &ours)).await;
    assert!(shown(&bench, &id, &ca).await < 11 * day);
    drop(driver);
    let driver = bench.driver().await;
    assert_eq!(run(&*driver, &id, "echo good").await, "good\n");
    until("it is replaced", async || shown(&bench, &id, &ca).await > 80 * day).await;
    assert_eq!((links(&*driver), execs(&bench)), ([0, 1], 1));
}

#[tokio::test]
async fn each_run_takes_one_exec_and_a_new_gateway_none() {
    let Some((bench, driver)) = bench("each_run_takes_one_exec_and_a_new_gateway_none", &[]).await else {
        return;
    };
    let id = ready(&*driver, &spec()).await;
    by_port(&*driver, 1).await;
    assert_eq!(run(&*driver, &id, "echo $GREETING").await, "hello\n");
    let data: Vec<u8> = (0..3 << 20).map(|n: u32| (n / 7) as u8).collect();
    let copied = copy(&*driver, &id, bench.folder.path(), data.clone()).await;
    assert!(fs::read(copied).unwrap() == data);
    assert_eq!(execs(&bench), 1);
    drop(driver);
    let driver = bench.driver().await;
    assert_eq!(driver.observe(&id).await.unwrap(), AGENT);
    assert_eq!(run(&*driver, &id, "echo again").await, "again\n");
    assert_eq!((links(&*driver), execs(&bench)), ([0, 1], 1), "a new gateway needs no exec");
    assert!(driver.stop(&id, Keep::Disk, GRACE).await.unwrap().flushed);
    assert_eq!(execs(&bench), 1, "nor does a suspend");
    driver.start(&id, Keep::Disk, Run(2)).await.unwrap();
    by_port(&*driver, 1).await;
    assert_eq!(run(&*driver, &id, "echo more").await, "more\n");
    assert_eq!(execs(&bench), 2);
    let key = fs::metadata(bench.config.state_dir.join("kubernetes/agents-ca.pem")).unwrap();
    assert_eq!(std::os::unix::fs::PermissionsExt::mode(&key.permissions()) & 0o777, 0o600);
    let stored =
        serde_json::to_string(&bench.server.asked().into_iter().map(|a| a.body).collect::<Vec<_>>()).unwrap();
    assert!(
        !stored.contains("PRIVATE KEY") && !stored.contains("\"Secret\""),
        "nothing of it is in the cluster"
    );
}

#[tokio::test]
async fn the_end_of_a_main_command_is_heard_by_its_port() {
    let Some((bench, driver)) = bench("the_end_of_a_main_command_is_heard_by_its_port", &[]).await else {
        return;
    };
    let command =
        ["/bin/sh", "-c", "while [ ! -e $END ]; do sleep 0.05; done; exit 3"].map(str::to_owned).to_vec();
    let end = bench.folder.path().join("end");
    let environment = [("END".to_owned(), end.to_str().unwrap().to_owned())].into();
    let id = ready(&*driver, &SandboxSpec { command, environment, ..spec() }).await;
    by_port(&*driver, 1).await;
    let mut hints = driver.hints();
    fs::write(&end, "").unwrap();
    let ended = Observed::Ended(Ended { run: Run(1), exit: Exit::Code(3) });
    tokio::time::timeout(Duration::from_secs(60), async {
        while hints.next().await.is_some() {
            if driver.observe(&id).await.unwrap() == ended {
                return;
            }
        }
    })
    .await
    .unwrap();
    assert_eq!(execs(&bench), 1);
}

#[tokio::test]
async fn an_agent_with_other_credentials_is_given_its_own_again() {
    let Some((bench, driver)) = bench("an_agent_with_other_credentials_is_given_its_own_again", &[]).await
    else {
        return;
    };
    let id = ready(&*driver, &spec()).await;
    by_port(&*driver, 1).await;
    let (ours, authority) = authority(&bench);
    let strange =
        CertifiedIssuer::self_signed(authority_params("strange"), KeyPair::generate().unwrap()).unwrap();
    // Expired; of somebody else's authority; of the right one with another's name; and an agent that lets others in.
    let mut expired = server_params(&bench, &id);
    (expired.not_before, expired.not_after) =
        (date_time_ymd(1970, 1, 1) + seconds(-7200), date_time_ymd(1970, 1, 1) + seconds(-3600));
    let mut other = CertificateParams::new(vec!["gateway.agents.torpor.internal".to_owned()]).unwrap();
    other.extended_key_usages = vec![Usage::ServerAuth];
    let right = server_params(&bench, &id);
    let cases = [
        ("expired", authority.clone(), signed(expired, &ours)),
        ("of a strange authority", authority.clone(), signed(right.clone(), &strange)),
        ("with another name", authority, signed(other, &ours)),
        ("an agent that lets others in", strange.der().to_vec(), signed(right, &ours)),
    ];
    let mut driver = driver;
    for (what, authority, server) in cases {
        let before = execs(&bench);
        enroll(&bench, &*driver, &id, authority, server).await;
        drop(driver);
        driver = bench.driver().await;
        assert_eq!(run(&*driver, &id, "echo ill").await, "ill\n", "{what}");
        by_port(&*driver, 1).await;
        assert_eq!(execs(&bench), before + 1, "{what}: healed by one exec");
        drop(driver);
        driver = bench.driver().await;
        assert_eq!(run(&*driver, &id, "echo well").await, "well\n");
        assert_eq!(execs(&bench), before + 1, "{what}");
    }
    // A lost file is another authority.
    let before = execs(&bench);
    drop(driver);
    fs::remove_file(bench.config.state_dir.join("kubernetes/agents-ca.pem")).unwrap();
    let driver = bench.driver().await;
    assert_eq!(run(&*driver, &id, "echo well").await, "well\n");
    by_port(&*driver, 1).await;
    assert_eq!(execs(&bench), before + 1);
    assert!(driver.stop(&id, Keep::Disk, GRACE).await.unwrap().flushed);
}

#[tokio::test]
async fn a_port_that_is_taken_leaves_exec_until_it_is_free() {
    let ip = format!("127.77.{}.1", std::process::id() as u8);
    let test = "a_port_that_is_taken_leaves_exec_until_it_is_free";
    let Some((bench, driver)) = bench(test, &[&ip]).await else { return };
    let address = SocketAddr::new(ip.parse().unwrap(), bench.config.agent_port);
    // As a program of the sandbox would that was faster than the agent.
    let taken = TcpListener::bind(address).unwrap();
    let id = ready(&*driver, &spec()).await;
    assert_eq!(run(&*driver, &id, "echo by exec").await, "by exec\n");
    assert_eq!(driver.observe(&id).await.unwrap(), AGENT);
    assert_eq!(links(&*driver), [1, 0]);
    assert_eq!(execs(&bench), 1, "the one connection is enough for everything");
    // A gateway that finds it so takes it for reachable at first, and isn't let in: nothing of ours answers there.
    drop(driver);
    let driver = bench.driver().await;
    assert_eq!(run(&*driver, &id, "echo still").await, "still\n");
    assert_eq!(links(&*driver), [1, 0]);
    drop(taken);
    until("tried again after a pause", async || {
        run(&*driver, &id, "echo when used").await;
        links(&*driver) == [0, 1]
    })
    .await;
    assert_eq!(run(&*driver, &id, "echo by port").await, "by port\n");
    assert!(driver.stop(&id, Keep::Disk, GRACE).await.unwrap().flushed);
}

#[tokio::test]
async fn a_pod_that_has_another_ones_address_gets_nothing_that_is_not_its_own() {
    let test = "a_pod_that_has_another_ones_address_gets_nothing_that_is_not_its_own";
    let Some((bench, driver)) = bench(test, &[]).await else { return };
    let named =
        |name: &str| SandboxSpec { environment: [("WHO".to_owned(), name.to_owned())].into(), ..spec() };
    let (liar, victim) = (ready(&*driver, &named("liar")).await, ready(&*driver, &named("victim")).await);
    by_port(&*driver, 2).await;
    let address = bench.server.object("pods", &object(&liar)).unwrap()["status"]["podIP"].clone();
    let taken = |pod: &mut serde_json::Value| {
        pod["status"]["podIP"] = address.clone();
        pod["status"]["podIPs"] = json!([{"ip": address}]);
    };
    assert!(bench.server.change_status("pods", &object(&victim), taken));
    drop(driver);
    let driver = bench.driver().await;
    assert_eq!(run(&*driver, &victim, "echo $WHO").await, "victim\n");
    assert_eq!(run(&*driver, &liar, "echo $WHO").await, "liar\n");
    assert_eq!(links(&*driver), [1, 1], "one of them by exec: there is somebody else at its address");
}

#[tokio::test]
async fn a_pod_has_an_address_of_the_newer_kind_one_of_each_or_none_yet() {
    let test = "a_pod_has_an_address_of_the_newer_kind_one_of_each_or_none_yet";
    let four = format!("127.78.{}.1", std::process::id() as u8);
    let port = {
        let free = TcpListener::bind(("::1", 0));
        free.map(|socket| socket.local_addr().unwrap().port())
    };
    let mut cases = vec![vec![String::new()]];
    if port.is_ok() {
        cases.push(vec!["::1".to_owned()]);
        // Nothing can listen on the first: it is nobody's here.
        cases.push(vec!["192.0.2.7".to_owned(), "::1".to_owned()]);
    }
    for ips in cases {
        let Some(agent) = common::agent(test) else { return };
        let behaviour = Behaviour { agent: Some(agent), pod_ips: ips.clone(), ..Behaviour::default() };
        let (bench, driver) = Bench::with(Generation::Stable, behaviour, |config| {
            config.agent_link = AgentLink::Mtls;
            config.agent_port = *port.as_ref().unwrap_or(&config.agent_port);
            config.dial_pause = Duration::from_millis(200);
        })
        .await;
        let id = ready(&*driver, &spec()).await;
        assert_eq!(run(&*driver, &id, "echo here").await, "here\n", "{ips:?}");
        if ips[0].is_empty() {
            assert_eq!(links(&*driver), [1, 0]);
            let later = |pod: &mut serde_json::Value| pod["status"]["podIP"] = json!(four);
            assert!(bench.server.change_status("pods", &object(&id), later));
            until("its address is there", async || {
                run(&*driver, &id, "echo when used").await;
                links(&*driver) == [0, 1]
            })
            .await;
        } else {
            by_port(&*driver, 1).await;
            assert_eq!(run(&*driver, &id, "echo there").await, "there\n", "{ips:?}");
        }
        assert!(driver.stop(&id, Keep::Disk, GRACE).await.unwrap().flushed);
    }
}

#[tokio::test]
async fn an_agent_that_knows_no_such_thing_is_reached_by_exec() {
    let (bench, driver) = with(Behaviour::default()).await;
    let id = ready(&*driver, &spec()).await;
    until("asked", async || links(&*driver) == [1, 0]).await;
    assert_eq!(driver.observe(&id).await.unwrap(), AGENT);
    assert_eq!(execs(&bench), 1);
    assert!(driver.stop(&id, Keep::Disk, GRACE).await.unwrap().flushed);
    assert_eq!(driver.start(&id, Keep::Disk, Run(2)).await.unwrap(), Change::Done);
}

#[tokio::test]
async fn an_endpoint_on_the_agents_port_is_refused_before_anything_is_made() {
    let (bench, driver) = with(Behaviour::default()).await;
    let endpoint = |port| Endpoint { name: "web".to_owned(), port, http_path: None };
    let id = SandboxId::generate();
    let on = |port| SandboxSpec { endpoints: vec![endpoint(port)], ..spec() };
    let refused = driver.create(&id, &on(7443), Run(1)).await.unwrap_err();
    assert!(
        matches!(&refused, DriverError::Unsupported(text) if text.contains("web") && text.contains("7443") && text.contains("agent_port")),
        "{refused}"
    );
    assert!(
        bench.server.names("sandboxes").is_empty() && bench.server.names("persistentvolumeclaims").is_empty()
    );
    driver.create(&id, &on(7444), Run(1)).await.unwrap();
    let (_other, exec) = Bench::new(Generation::Stable).await;
    exec.create(&id, &on(7443), Run(1)).await.unwrap();
}

#[tokio::test]
async fn the_doctor_says_which_link_there_is_and_how_its_authority_is() {
    let (bench, _) = Bench::new(Generation::Stable).await;
    let find = async |config| {
        let all = diagnose(&config).await.unwrap();
        all.into_iter().find(|one| one.name == "agent-link").unwrap()
    };
    let mut config = bench.config.clone();
    let found = find(config.clone()).await;
    assert!(found.level == Level::Ok && found.finding.contains("exec"), "{found:?}");
    config.agent_link = AgentLink::Mtls;
    let found = find(config.clone()).await;
    let file = config.state_dir.join("kubernetes/agents-ca.pem");
    assert!(found.level == Level::Ok && found.finding.contains("is made"), "{found:?}");
    assert!(found.finding.contains("7443") && found.finding.contains(file.to_str().unwrap()), "{found:?}");
    assert!(!file.exists(), "a doctor looks only");
    drop(KubernetesDriver::new(config.clone()).await.unwrap());
    let found = find(config.clone()).await;
    assert!(found.level == Level::Ok && found.finding.contains("expires in 36"), "{found:?}");
    fs::write(&file, "gone bad").unwrap();
    let found = find(config).await;
    assert!(found.level == Level::Warn && found.finding.contains("can't be used"), "{found:?}");
}
