//! The unmodified client of another project, from its package, against a gateway: tests/openshell/conformance.py.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{
    fs,
    net::{Ipv4Addr, TcpListener},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use nix::fcntl::{Flock, FlockArg};
use torpor_tests::{Host, can_run_vms, need, programs, tiny_tree, torpor_program, wait_at_most};

/// The package, of which exactly this version is meant.
const CLIENT: &str = "openshell==0.1.5";
/// Debian's own: the sandbox has the same one, as functions are sent in its byte code.
const PYTHON: &str = "/usr/bin/python3";
/// For everything; it takes a minute on an idle machine.
const PATIENCE: Duration = Duration::from_secs(900);

fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("openshell").join(name)
}

fn succeeds(command: &mut Command) -> bool {
    command.stdin(Stdio::null()).stdout(Stdio::null()).status().is_ok_and(|status| status.success())
}

/// A virtual environment with the client, made once per build folder.
fn client(test: &str) -> Option<PathBuf> {
    let can = succeeds(Command::new(PYTHON).args(["-c", "import ensurepip, venv"]).stderr(Stdio::null()));
    if !need(test, "tools", can, "python3-venv is not installed") {
        return None;
    }
    let dir = programs().join("torpor-tests").join(CLIENT);
    fs::create_dir_all(&dir).unwrap();
    let file = fs::File::create(dir.join("lock")).unwrap();
    let _lock = Flock::lock(file, FlockArg::LockExclusive).map_err(|(_, e)| e).unwrap();
    let venv = dir.join("venv");
    if !dir.join("complete").exists() {
        let _ = fs::remove_dir_all(&venv);
        let made = succeeds(Command::new(PYTHON).args(["-m", "venv"]).arg(&venv))
            && succeeds(Command::new(venv.join("bin/pip")).args(["install", "--quiet", CLIENT]));
        if !need(test, "tools", made, "the client's package could not be installed with pip") {
            return None;
        }
        fs::write(dir.join("complete"), "").unwrap();
    }
    Some(venv)
}

/// The tree of the image with Python in it.
fn python_tree(venv: &Path) -> PathBuf {
    let tree = venv.parent().unwrap().join("tree");
    if !tree.join("usr/bin/python").exists() {
        let _ = fs::remove_dir_all(&tree);
        let site =
            fs::read_dir(venv.join("lib")).unwrap().next().unwrap().unwrap().path().join("site-packages");
        let mut make = Command::new(PYTHON);
        make.arg(script("image.py")).arg(tiny_tree()).arg(site).arg(&tree);
        assert!(succeeds(&mut make), "{make:?}");
    }
    tree
}

/// A gateway that is reached by TCP, and where.
fn host(more: &str) -> (Host, String) {
    let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap();
    let tcp = format!("{more}\n[[tcp]]\naddress = '{free}'\nplaintext = true\nanonymous = 'admin'\n");
    (Host::empty(&tcp), free.to_string())
}

/// Runs the script; it must end well, having checked enough.
fn conform(host: &Host, venv: &Path, endpoint: &str, more: &[&str], least: usize) {
    let endpoint_of_cli = host.command(&[]);
    let (key, value) = endpoint_of_cli.get_envs().next().unwrap();
    let log = host.dir().join("conformance.log");
    let mut child = Command::new(venv.join("bin/python"))
        .arg(script("conformance.py"))
        .args(["--endpoint", endpoint, "--torpor"])
        .arg(torpor_program())
        .args(more)
        .env(key, value.unwrap())
        .env_remove("PYTHONPATH")
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .stdin(Stdio::null())
        .stdout(fs::File::create(&log).unwrap())
        .stderr(fs::File::options().append(true).open(&log).unwrap())
        .spawn()
        .unwrap();
    let status = wait_at_most(&mut child, PATIENCE);
    let said = fs::read_to_string(&log).unwrap();
    println!("{said}");
    assert!(status.is_some_and(|status| status.success()), "{status:?}\n{said}");
    let passed = said.lines().filter(|line| line.starts_with("ok ")).count();
    assert!(passed >= least, "{passed} checks");
}

#[test]
fn an_unmodified_client_uses_virtual_machines() {
    let test = "an_unmodified_client_uses_virtual_machines";
    if !can_run_vms(test) {
        return;
    }
    let Some(venv) = client(test) else { return };
    let (host, endpoint) = host("");
    host.ok(&["image", "import", "tiny", tiny_tree().to_str().unwrap()]);
    host.ok(&["image", "import", "python", python_tree(&venv).to_str().unwrap()]);
    conform(&host, &venv, &endpoint, &["--image", "python"], 55);
}

#[test]
fn an_unmodified_client_uses_what_needs_no_guest() {
    let Some(venv) = client("an_unmodified_client_uses_what_needs_no_guest") else { return };
    let (host, endpoint) = host("drivers = ['sim']");
    conform(&host, &venv, &endpoint, &["--no-guest"], 40);
}
