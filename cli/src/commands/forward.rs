//! `torpor forward`

use std::{
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::Arc,
};

use bytes::BytesMut;
use clap::Args;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{
        TcpListener, TcpStream,
        tcp::{ReadHalf, WriteHalf},
    },
    sync::Semaphore,
};
use torpor_sdk::{Client, Event, Forward, ForwardInput, ForwardOutput, phase, v1};

use super::Outcome;
use crate::{
    failure::{FAILED, Failure, NOT_FOUND, PRECONDITION},
    output::{self, Format, clean, network::Forwarded},
    session::Session,
};

/// Bytes read from a connection at once.
const PIECE: usize = 32 << 10;
/// Connections at once; more wait.
const CONNECTIONS: usize = 256;
/// After a failed accept, so that a lasting fault doesn't take the whole CPU.
const ACCEPT_AGAIN: std::time::Duration = std::time::Duration::from_millis(200);

#[derive(Args)]
pub struct ForwardArgs {
    /// Name or id of a ready sandbox.
    name: String,
    /// Where to listen here, and the port in the sandbox: 8080:80, 127.0.0.1:8080:80, or 80 for the same port on both
    /// sides. Local port 0 is a free one. May be repeated.
    #[arg(required = true, value_name = "[ADDRESS:]LOCAL:REMOTE", value_parser = route)]
    ports: Vec<Route>,
}

/// A local address and a port in the sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    local: SocketAddr,
    remote: u16,
}

fn route(text: &str) -> Result<Route, String> {
    let wrong = || format!("'{text}' is not LOCAL:REMOTE or ADDRESS:LOCAL:REMOTE, as in 8080:80");
    let number = |text: &str| text.parse::<u16>().ok();
    let (rest, remote) = text.rsplit_once(':').unwrap_or((text, text));
    let remote = number(remote).filter(|port| *port > 0).ok_or_else(wrong)?;
    let local = match rest.rsplit_once(':') {
        None => SocketAddr::from((IpAddr::V4(Ipv4Addr::LOCALHOST), number(rest).ok_or_else(wrong)?)),
        Some(_) => rest.parse().map_err(|_| wrong())?,
    };
    Ok(Route { local, remote })
}

/// Listens here and carries connections into a sandbox, until the sandbox leaves Ready or the program is ended.
pub async fn run(session: &Session, args: ForwardArgs) -> Outcome {
    let client = session.connect().await?;
    let sandbox = client.get(&args.name).await?;
    if phase::of(&sandbox) != v1::Phase::Ready {
        return Err(left(&sandbox));
    }
    let mut listeners = Vec::new();
    for route in args.ports {
        let listener = TcpListener::bind(route.local).await.map_err(|error| cannot_listen(route, &error))?;
        let local = listener.local_addr().map_err(|error| cannot_listen(route, &error))?;
        listeners.push((Route { local, ..route }, listener));
    }
    let told: Vec<Route> = listeners.iter().map(|(route, _)| *route).collect();
    let places = Arc::new(Semaphore::new(CONNECTIONS));
    for (route, listener) in listeners {
        let (client, id, places) = (client.clone(), sandbox.id.clone(), places.clone());
        tokio::spawn(accept(client, id, route, listener, places));
    }
    for route in told {
        tell(session, &sandbox, route)?;
    }
    Err(watch(&client, &sandbox).await?)
}

fn tell(session: &Session, sandbox: &v1::Sandbox, route: Route) -> Result<(), Failure> {
    let (local, port) = (route.local.to_string(), route.remote);
    match session.format {
        Format::Table => output::text(&format!("{local} -> {}:{port}\n", clean(&sandbox.name))),
        Format::Name => output::text(&format!("{local}\n")),
        format => {
            let (name, id) = (sandbox.name.clone(), sandbox.id.clone());
            output::structured_item(format, &Forwarded { name, id, local, port })
        }
    }
}

fn cannot_listen(route: Route, error: &io::Error) -> Failure {
    Failure::new(FAILED, format!("listen on {}: {error}", route.local))
}

/// Returns when the run that is forwarded to is over.
async fn watch(client: &Client, sandbox: &v1::Sandbox) -> Result<Failure, Failure> {
    let run = |sandbox: &v1::Sandbox| sandbox.status.as_ref().map_or(0, |status| status.run);
    let mut watch =
        client.watch(v1::WatchSandboxesRequest { sandbox: sandbox.id.clone(), ..Default::default() });
    let mut seen = false;
    loop {
        match watch.next().await? {
            Event::Snapshot(now) | Event::Changed(now) => {
                seen = true;
                if phase::of(&now) != v1::Phase::Ready || run(&now) != run(sandbox) {
                    return Ok(left(&now));
                }
            }
            Event::Deleted(_) => return Ok(gone(sandbox)),
            Event::Synced if !seen => return Ok(gone(sandbox)),
            Event::Reset => seen = false,
            Event::Synced => {}
        }
    }
}

fn gone(sandbox: &v1::Sandbox) -> Failure {
    Failure::new(NOT_FOUND, format!("sandbox '{}' was deleted", sandbox.name))
}

/// A sandbox that can't be forwarded to, or not any more.
fn left(sandbox: &v1::Sandbox) -> Failure {
    let (name, now) = (&sandbox.name, phase::of(sandbox));
    let mut failure = Failure::new(
        PRECONDITION,
        match now {
            v1::Phase::Ready => format!("sandbox '{name}' has begun another run: the forward has ended"),
            _ => format!("sandbox '{name}' is {}, not Ready: nothing is forwarded", phase::name(now)),
        },
    );
    failure.told.next = match now {
        v1::Phase::Suspended | v1::Phase::Suspending | v1::Phase::Error => format!("torpor resume {name}"),
        v1::Phase::Stopped | v1::Phase::Stopping | v1::Phase::Completed => format!("torpor start {name}"),
        v1::Phase::Ready => format!("torpor forward {name} …"),
        _ => format!("torpor wait {name}"),
    };
    failure
}

async fn accept(client: Client, id: String, route: Route, listener: TcpListener, places: Arc<Semaphore>) {
    loop {
        let Ok(place) = places.clone().acquire_owned().await else { return };
        match listener.accept().await {
            Ok((stream, _)) => {
                let (client, id) = (client.clone(), id.clone());
                tokio::spawn(async move {
                    carry(&client, &id, route, stream).await;
                    drop(place);
                });
            }
            Err(_) => tokio::time::sleep(ACCEPT_AGAIN).await,
        }
    }
}

/// One connection to its end. What does not end in order is reset, so that nobody takes half for the whole.
async fn carry(client: &Client, id: &str, route: Route, mut stream: TcpStream) {
    // Only slower when it can't be set.
    let _ = stream.set_nodelay(true);
    let in_order = match client.forward(id, u32::from(route.remote)).await {
        Ok(Forward { input, mut output }) => {
            let (read, write) = stream.split();
            let (up, down) = (upwards(read, &input), downwards(&mut output, write));
            tokio::try_join!(up, down).map(drop)
        }
        Err(error) => Err(Some(Failure::from(error))),
    };
    if let Err(failure) = in_order {
        if let Some(failure) = failure {
            failure.print(&route.local.to_string());
        }
        // Without it the other side sees an end in place of a break.
        let _ = stream.set_zero_linger();
    }
}

async fn upwards(mut read: ReadHalf<'_>, input: &ForwardInput) -> Result<(), Option<Failure>> {
    let mut buffer = BytesMut::new();
    loop {
        buffer.reserve(PIECE);
        // What breaks here is the local client's business.
        let more = match read.read_buf(&mut buffer).await {
            Ok(0) => {
                input.close().await;
                return Ok(());
            }
            Ok(_) => input.write(buffer.split().freeze()).await,
            Err(_) => return Err(None),
        };
        if !more {
            // The other direction tells why.
            return Ok(());
        }
    }
}

async fn downwards(output: &mut ForwardOutput, mut write: WriteHalf<'_>) -> Result<(), Option<Failure>> {
    while let Some(bytes) = output.next().await.map_err(|error| Some(Failure::from(error)))? {
        write.write_all(&bytes).await.map_err(|_| None)?;
    }
    // Fails only when the local client has gone.
    write.shutdown().await.map_err(|_| None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn routes_are_read_and_wrong_ones_say_how_they_look() {
        let read = |text| route(text).map(|route| format!("{} {}", route.local, route.remote));
        assert_eq!(read("8080:80").unwrap(), "127.0.0.1:8080 80");
        assert_eq!(read("80").unwrap(), "127.0.0.1:80 80");
        assert_eq!(read("0:80").unwrap(), "127.0.0.1:0 80");
        assert_eq!(read("0.0.0.0:8080:80").unwrap(), "0.0.0.0:8080 80");
        assert_eq!(read("[::1]:8080:80").unwrap(), "[::1]:8080 80");
        for bad in
            ["", ":", "8080:", ":80", "8080:0", "x:80", "1.2.3.4:80", "localhost:1:2", "1:2:3:4", "99999:1"]
        {
            assert!(read(bad).unwrap_err().contains("8080:80"), "{bad}");
        }
    }
}
