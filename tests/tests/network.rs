//! Egress policies, exposed ports, forwards and names of real virtual machines.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::TcpStream,
    process::{Child, Command, Stdio},
    time::Duration,
};

use serde_json::Value;
use torpor_tests::{Host, can_run_vms, need};

/// A public address outside of the host, and a private one beside it.
const PUBLIC: &str = "198.51.100.2";
const PRIVATE: &str = "10.251.99.2";
/// What the servers in the sandbox hold.
const FILE_BYTES: usize = 6 << 20;

fn ip(arguments: &str) -> bool {
    let path = "/usr/sbin:/sbin:/usr/bin:/bin";
    let done = Command::new("ip").args(arguments.split(' ')).env("PATH", path).status();
    done.is_ok_and(|status| status.success())
}

/// A network namespace that is the world outside, with a web server at both addresses, ports 80 and 81.
struct Outside {
    servers: Vec<Child>,
    _folder: tempfile::TempDir,
}

impl Outside {
    fn new() -> Self {
        Self::remove();
        for line in [
            "netns add torpor-tt",
            "link add tt-out type veth peer name tt-in netns torpor-tt",
            "addr add 198.51.100.1/29 dev tt-out",
            "link set tt-out up",
            "route add 10.251.99.2/32 via 198.51.100.2 dev tt-out onlink",
            "-n torpor-tt addr add 198.51.100.2/29 dev tt-in",
            "-n torpor-tt addr add 10.251.99.2/32 dev lo",
            "-n torpor-tt link set lo up",
            "-n torpor-tt link set tt-in up",
        ] {
            assert!(ip(line), "ip {line}");
        }
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("index.html"), "outside").unwrap();
        let serve = |port: &str| {
            Command::new("ip")
                .args(["netns", "exec", "torpor-tt", "busybox", "httpd", "-f", "-p", port, "-h"])
                .arg(folder.path())
                .env("PATH", "/usr/sbin:/sbin:/usr/bin:/bin")
                .spawn()
                .unwrap()
        };
        Self { servers: ["80", "81"].map(serve).into(), _folder: folder }
    }

    fn remove() {
        let _ = Command::new("ip").args(["link", "del", "tt-out"]).stderr(Stdio::null()).status();
        let _ = Command::new("ip").args(["netns", "del", "torpor-tt"]).stderr(Stdio::null()).status();
    }
}

impl Drop for Outside {
    fn drop(&mut self) {
        for server in &mut self.servers {
            let _ = server.kill();
            let _ = server.wait();
        }
        Self::remove();
    }
}

/// Which of the outside's addresses the sandbox gets an answer from: public 80, public 81, private 80.
fn reached(host: &Host, name: &str) -> String {
    // (busybox's wget crashes with a timeout.)
    let script = format!(
        "for at in '{PUBLIC} 80' '{PUBLIC} 81' '{PRIVATE} 80'; do \
           if printf 'GET / HTTP/1.0\\r\\n\\r\\n' | nc -w 2 $at 2>/dev/null | grep -q outside; \
           then printf y; else printf n; fi; done"
    );
    host.sh(name, &script)
}

#[test]
fn an_egress_policy_holds_from_the_first_packet_changes_at_once_and_lasts() {
    let test = "an_egress_policy_holds_from_the_first_packet_changes_at_once_and_lasts";
    if !can_run_vms(test) || !need(test, "root", ip("netns list"), "no network namespaces") {
        return;
    }
    let _outside = Outside::new();
    let host = Host::new();
    let (code, errors) = host.fails(&["create", "bad", "--allow", "192.0.2.7:http"]);
    assert!(code == 2 && errors.contains("192.0.2.7:http"), "{code}: {errors}");
    assert_eq!(host.ok(&["list", "-q"]), "", "nothing was made");

    host.ok(&["create", "web", "--egress", "none"]);
    assert_eq!(host.get("web")["egress"]["policy"], "none");
    assert_eq!(reached(&host, "web"), "nnn");
    for (arguments, expected) in [
        (&["--egress", "public"][..], "yyn"),
        (&["--egress", "open"], "yyy"),
        (&["--allow", "198.51.100.2:81"], "nyn"),
        (&["--allow", "10.251.99.0/24", "--allow", "198.51.100.2:80-81/tcp"], "yyy"),
        (&["--egress", "default"], "yyn"),
        (&["--allow", "198.51.100.0/24:80"], "ynn"),
    ] {
        host.ok(&[&["sandbox", "network", "web"], arguments].concat());
        assert_eq!(reached(&host, "web"), expected, "{arguments:?}");
    }
    // A new gateway, a new run.
    host.restart_gateway();
    assert_eq!(reached(&host, "web"), "ynn");
    host.ok(&["suspend", "web"]);
    host.ok(&["sandbox", "network", "web", "--allow", "198.51.100.2:81"]);
    host.ok(&["resume", "web"]);
    assert_eq!(reached(&host, "web"), "nyn");
    let shown = host.get("web");
    assert_eq!(shown["egress"]["allow"][0], "198.51.100.2/32:81/tcp");

    // Killed in the middle of a change.
    for (failpoint, policy, expected) in [
        ("vm.adjust.noted", "open", "yyy"),
        ("vm.adjust.recorded", "none", "nnn"),
        ("vm.adjust.replaced", "open", "yyy"),
    ] {
        host.kill_gateway();
        host.start_gateway_with(&format!("{failpoint}=abort"));
        if !host.gateway_log().contains("built with failpoints") {
            let _ = std::io::Write::write_fmt(
                &mut std::io::stderr(),
                format_args!(
                    "SKIP the kills of {test}: torpor was built without --features torpor-cli/failpoints\n"
                ),
            );
            break;
        }
        let _ = host.run(&["sandbox", "network", "web", "--egress", policy]);
        host.gateway_ends(failpoint);
        host.start_gateway();
        host.until(failpoint, |host| reached(host, "web") == expected);
    }

    // Somebody flushes the table: it comes back with the policy.
    let expected = reached(&host, "web");
    let table = format!("torpor_{}", host.instance());
    let flushed = Command::new("nft").args(["delete", "table", "inet", &table]).status().unwrap();
    assert!(flushed.success());
    host.until("the table is back", |host| {
        host.gateway_log().contains("firewall's table was gone") && reached(host, "web") == expected
    });
    let borrowed = shown["host"].clone();
    host.ok(&["delete", "web"]);
    assert_eq!(host.leftovers(shown["id"].as_str().unwrap(), &borrowed), Vec::<String>::new());
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}"))
}

/// The answer to GET, head and body.
fn get(at: &str, path: &str) -> (String, Vec<u8>) {
    let mut stream = TcpStream::connect(at).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
    stream.write_all(format!("GET {path} HTTP/1.0\r\nhost: x\r\n\r\n").as_bytes()).unwrap();
    let mut all = Vec::new();
    stream.read_to_end(&mut all).unwrap();
    let end = all.windows(4).position(|w| w == b"\r\n\r\n").unwrap_or_else(|| panic!("{all:?}"));
    (String::from_utf8_lossy(&all[..end]).into_owned(), all[end + 4..].to_vec())
}

#[test]
fn ports_of_a_vm_are_reached_through_the_gateway_awake_asleep_and_waking() {
    let test = "ports_of_a_vm_are_reached_through_the_gateway_awake_asleep_and_waking";
    if !can_run_vms(test) {
        return;
    }
    let host = Host::new();
    let serve = format!(
        "mkdir -p /www; echo hello > /www/index.html; \
         [ -e /www/big ] || dd if=/dev/urandom of=/www/big bs=1M count={} 2>/dev/null; \
         exec httpd -f -p 127.0.0.1:8080 -h /www",
        FILE_BYTES >> 20
    );
    // No network at all: what comes in does not come by it.
    host.ok(&["create", "web", "--egress", "none", "--", "sh", "-c", &serve]);
    let exposed = json(&host.ok(&["expose", "web", "8080", "-o", "json"]));
    let at = exposed["host"].as_str().unwrap().to_owned();
    host.until("the server listens", |_| get(&at, "/").0.contains(" 200 "));
    assert_eq!(get(&at, "/").1, b"hello\n");
    let (head, big) = get(&at, "/big");
    assert!(head.contains(" 200 ") && big.len() == FILE_BYTES, "{} bytes: {head}", big.len());
    let sum = host.sh("web", "sha256sum /www/big");
    assert!(sum.starts_with(&sha256(&big)), "{sum}");

    let mut forward = host
        .command(&["forward", "web", "0:8080", "-o", "json"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(forward.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let local = json(&line)["local"].as_str().unwrap().to_owned();
    assert!(get(&local, "/big").1 == big);

    host.ok(&["suspend", "web"]);
    let ended = torpor_tests::wait_at_most(&mut forward, Duration::from_secs(30)).unwrap();
    assert_eq!(ended.code(), Some(4), "the forward ends with the run");
    assert!(TcpStream::connect(&local).is_err());
    let (head, body) = get(&at, "/");
    assert!(head.contains(" 503 ") && head.contains("x-torpor-phase: Suspended"), "{head}");
    assert!(String::from_utf8_lossy(&body).contains("torpor resume web"), "{body:?}");
    assert_eq!(host.get("web")["phase"], "Suspended");

    host.restart_gateway();
    let again = json(&host.ok(&["expose", "web", "8080", "--wake", "-o", "json"]));
    assert_eq!(again["host"], at.as_str());
    assert_eq!(get(&at, "/").1, b"hello\n", "it was woken, and its server waited for");
    assert_eq!(host.get("web")["phase"], "Ready");
    assert!(get(&at, "/big").1 == big, "the same disk");

    host.ok(&["delete", "web"]);
    host.until("the port is closed", |_| TcpStream::connect(&at).is_err());
    assert_eq!(json(&host.ok(&["expose", "list", "-o", "json"])), json("[]"));
}

fn sha256(bytes: &[u8]) -> String {
    use sha2::Digest as _;
    format!("{:x}", sha2::Sha256::digest(bytes))
}

/// A name server that knows one address, on a loopback address as a host's stub has.
struct NameServer(Child);

impl NameServer {
    const ADDRESS: &str = "127.9.9.53";
    const PROGRAM: &str = r"
import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind(('127.9.9.53', 53))
print('ready', flush=True)
while True:
    q, a = s.recvfrom(2048)
    n = 12
    while q[n]: n += q[n] + 1
    one = q[n + 1:n + 3] == b'\0\1'
    r = q[:2] + b'\x81\x80' + q[4:6] + (b'\0\1' if one else b'\0\0') + b'\0\0\0\0' + q[12:n + 5]
    if one: r += b'\xc0\x0c\0\1\0\1\0\0\0\x3c\0\4' + bytes([198, 51, 100, 7])
    s.sendto(r, a)
";

    /// None: there is no python, or somebody else answers there.
    fn start() -> Option<Self> {
        let mut command = Command::new("python3");
        let mut child = command.args(["-c", Self::PROGRAM]).stdout(Stdio::piped()).spawn().ok()?;
        let mut line = String::new();
        BufReader::new(child.stdout.take()?).read_line(&mut line).ok()?;
        let this = Self(child);
        line.starts_with("ready").then_some(this)
    }
}

impl Drop for NameServer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn guests_ask_their_gateway_address_for_names_and_a_vm_has_a_limit_of_cpu_time() {
    let test = "guests_ask_their_gateway_address_for_names_and_a_vm_has_a_limit_of_cpu_time";
    if !can_run_vms(test) {
        return;
    }
    let server = NameServer::start();
    if !need(test, "tools", server.is_some(), "no name server of our own could be started") {
        return;
    }
    let host = Host::with(&format!("nameservers = ['{}']", NameServer::ADDRESS));
    host.ok(&["create", "web"]);
    let shown = host.get("web");
    let own: std::net::Ipv4Addr = shown["host"]["ip"].as_str().unwrap().parse().unwrap();
    let gateway = std::net::Ipv4Addr::from_bits(own.to_bits() - 1);
    let asked = host.sh("web", "cat /etc/resolv.conf");
    let servers: Vec<&str> = asked.lines().filter(|line| line.starts_with("nameserver")).collect();
    assert_eq!(servers, [format!("nameserver {gateway}")], "and never the host's loopback");
    assert!(host.sh("web", "nslookup example.test").contains("198.51.100.7"));
    let answered = |host: &Host| {
        host.run(&["exec", "web", "--timeout", "4s", "--", "nslookup", "example.test"]).status.success()
    };
    host.ok(&["sandbox", "network", "web", "--allow", "192.0.2.0/24"]);
    assert!(!answered(&host), "names are part of the policy");
    host.ok(&["sandbox", "network", "web", "--allow", "192.0.2.0/24", "--allow-names"]);
    host.until("names again", answered);
    host.restart_gateway();
    host.until("the next gateway forwards, too", answered);
    let id = shown["id"].as_str().unwrap();
    let bases = ["", "/unified", "/cpu", "/cpu,cpuacct"].map(|tree| format!("/sys/fs/cgroup{tree}"));
    let limit = bases
        .iter()
        .flat_map(|base| {
            let folder = format!("{base}/torpor_{}/{id}", host.instance());
            [format!("{folder}/cpu.max"), format!("{folder}/cpu.cfs_quota_us")]
        })
        .find_map(|path| std::fs::read_to_string(path).ok());
    if need(test, "none", limit.is_some(), "no cgroup with the controller cpu can be written") {
        assert!(limit.unwrap().starts_with("125000"), "one CPU, and a quarter for its devices");
    }
}
