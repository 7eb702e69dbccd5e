//! Connections from the host to ports of the sandbox.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::{net::IpAddr, time::Duration};

use common::{Agent, Client, LIMIT};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    sync::mpsc,
    time::timeout,
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Streaming};
use torpor_proto::agent::v1::{
    ForwardClose, ForwardInput, ForwardOutput, ForwardStart, forward_error, forward_input,
    forward_output::Kind,
};

struct Forward {
    input: mpsc::Sender<ForwardInput>,
    output: Streaming<ForwardOutput>,
}

impl Forward {
    async fn start(client: &mut Client, port: u16) -> Self {
        let (input, inputs) = mpsc::channel(4);
        let this = ForwardStart { port: port.into() };
        input.send(ForwardInput { kind: Some(forward_input::Kind::Start(this)) }).await.unwrap();
        let output = client.forward(ReceiverStream::new(inputs)).await.unwrap().into_inner();
        Self { input, output }
    }

    async fn connected(client: &mut Client, port: u16) -> Self {
        let mut this = Self::start(client, port).await;
        assert!(matches!(this.next().await, Some(Kind::Connected(_))));
        this
    }

    async fn next(&mut self) -> Option<Kind> {
        timeout(LIMIT, self.output.message()).await.expect("the connection hangs").unwrap()?.kind
    }

    async fn send(&self, data: Vec<u8>) {
        self.input.send(ForwardInput { kind: Some(forward_input::Kind::Data(data.into())) }).await.unwrap();
    }

    async fn close(&self) {
        let close = forward_input::Kind::Close(ForwardClose {});
        self.input.send(ForwardInput { kind: Some(close) }).await.unwrap();
    }
}

async fn listen(address: &str) -> (TcpListener, u16) {
    let address: IpAddr = address.parse().unwrap();
    let listener = TcpListener::bind((address, 0)).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    (listener, port)
}

async fn accept(listener: &TcpListener) -> TcpStream {
    timeout(LIMIT, listener.accept()).await.expect("nobody connects").unwrap().0
}

#[tokio::test(flavor = "multi_thread")]
async fn bytes_go_both_ways_and_a_half_that_ends_leaves_the_other_open() {
    let agent = Agent::start().await;
    let mut client = agent.ready().await;
    let (listener, port) = listen("127.0.0.1").await;
    let server = tokio::spawn(async move {
        let mut stream = accept(&listener).await;
        stream.write_all(b"hello").await.unwrap();
        let mut all = Vec::new();
        stream.read_to_end(&mut all).await.unwrap();
        // Its reader has long ended when this is sent.
        stream.write_all(format!("{} bytes", all.len()).as_bytes()).await.unwrap();
        all
    });
    let mut forward = Forward::connected(&mut client, port).await;
    assert_eq!(forward.next().await, Some(Kind::Data("hello".into())));
    let sent: Vec<u8> = (0..3_000_000_u32).map(|n| (n % 251) as u8).collect();
    for piece in sent.chunks(50_000) {
        forward.send(piece.to_vec()).await;
    }
    forward.close().await;
    let mut answer = Vec::new();
    while let Some(Kind::Data(data)) = forward.next().await {
        answer.extend_from_slice(&data);
    }
    assert_eq!(String::from_utf8(answer).unwrap(), "3000000 bytes");
    assert_eq!(forward.next().await, None, "both directions have ended");
    assert!(server.await.unwrap() == sent);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_port_where_nothing_listens_is_told_and_one_of_ipv6_is_found() {
    let agent = Agent::start().await;
    let mut client = agent.ready().await;
    let (listener, port) = listen("127.0.0.1").await;
    drop(listener);
    let mut forward = Forward::start(&mut client, port).await;
    match forward.next().await {
        Some(Kind::Error(error)) => {
            assert_eq!(error.kind(), forward_error::Kind::Refused);
            assert!(error.message.contains(&port.to_string()), "{}", error.message);
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(forward.next().await, None);
    let mut wrong = Forward::start(&mut client, 1).await;
    assert!(matches!(wrong.next().await, Some(Kind::Error(_))));
    if TcpListener::bind("[::1]:0").await.is_err() {
        let _ = std::io::Write::write_fmt(
            &mut std::io::stderr(),
            format_args!("SKIP a_port_where_nothing_listens_is_told_and_one_of_ipv6_is_found: no ipv6\n"),
        );
        return;
    }
    let (listener, port) = listen("::1").await;
    let _forward = Forward::connected(&mut client, port).await;
    accept(&listener).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_goes_away_breaks_the_connection_and_a_broken_server_is_told() {
    let agent = Agent::start().await;
    let mut client = agent.ready().await;
    let (listener, port) = listen("127.0.0.1").await;
    let forward = Forward::connected(&mut client, port).await;
    let mut stream = accept(&listener).await;
    drop(forward);
    let end = timeout(LIMIT, stream.read(&mut [0; 8])).await.unwrap();
    assert_eq!(end.unwrap_err().kind(), std::io::ErrorKind::ConnectionReset);

    let mut forward = Forward::connected(&mut client, port).await;
    let stream = accept(&listener).await;
    // What it has not read when it closes makes the kernel break the connection.
    forward.send(b"unread".to_vec()).await;
    assert_eq!(stream.peek(&mut [0; 8]).await.unwrap(), 6);
    drop(stream);
    let end = loop {
        match timeout(LIMIT, forward.output.message()).await.unwrap() {
            Ok(Some(_)) => {}
            Ok(None) => panic!("it ended in order"),
            Err(status) => break status,
        }
    };
    assert_eq!(end.code(), Code::Aborted, "{end:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_does_not_read_stops_its_sender_and_nobody_else() {
    const PIECE: usize = 64 << 10;
    let agent = Agent::start().await;
    let mut client = agent.ready().await;
    let (listener, port) = listen("127.0.0.1").await;
    let forward = Forward::connected(&mut client, port).await;
    let mut stuck = accept(&listener).await;
    let mut taken = 0;
    let data = || ForwardInput { kind: Some(forward_input::Kind::Data(vec![7; PIECE].into())) };
    while timeout(Duration::from_millis(700), forward.input.send(data())).await.is_ok() {
        taken += PIECE;
        assert!(taken < 64 << 20, "nothing stops it");
    }
    let mut other = Forward::connected(&mut client, port).await;
    let mut stream = accept(&listener).await;
    stream.write_all(b"still here").await.unwrap();
    assert_eq!(other.next().await, Some(Kind::Data("still here".into())));
    // It goes on where it stood.
    drop(other);
    let reader = tokio::spawn(async move {
        let mut all = Vec::new();
        stuck.read_to_end(&mut all).await.unwrap();
        all.len()
    });
    forward.close().await;
    assert_eq!(timeout(LIMIT, reader).await.unwrap().unwrap(), taken);
}
