//! Answers: one JSON object, or a stream of them as lines or as server-sent events.

use std::{convert::Infallible, pin::Pin, sync::Arc, time::Duration};

use bytes::Bytes;
use futures::{Stream, StreamExt as _, stream};
use http::{HeaderMap, Response, StatusCode, header};
use http_body::Frame;
use http_body_util::StreamBody;
use prost_reflect::{DescriptorPool, DynamicMessage, ReflectMessage as _, SerializeOptions};
use serde_json::json;
use tokio::time::{Instant, sleep_until};
use tonic::{Status, body::Body};

use crate::status;

/// How often a silent stream of events says that it is still there: proxies cut those that say nothing.
const STILL_THERE: Duration = Duration::from_secs(15);

/// How a stream is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// One object a line.
    Lines,
    /// text/event-stream.
    Events,
}

impl Form {
    /// What the client prefers.
    pub fn wanted(headers: &HeaderMap) -> Self {
        let accepted = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
        let events = accepted
            .flat_map(|value| value.split(','))
            .any(|one| one.trim().starts_with("text/event-stream"));
        if events { Self::Events } else { Self::Lines }
    }

    fn content_type(self) -> &'static str {
        match self {
            Self::Lines => "application/x-ndjson",
            Self::Events => "text/event-stream",
        }
    }

    fn message(self, message: &DynamicMessage) -> Result<Bytes, Status> {
        let text = text(message)?;
        Ok(match self {
            Self::Lines => Bytes::from(format!("{text}\n")),
            Self::Events => match cursor(message) {
                Some(cursor) => Bytes::from(format!("id: {cursor}\ndata: {text}\n\n")),
                None => Bytes::from(format!("data: {text}\n\n")),
            },
        })
    }

    fn failure(self, status: &Status, types: &DescriptorPool) -> Bytes {
        let error = status::object(status, types);
        Bytes::from(match self {
            Self::Lines => format!("{}\n", json!({"error": error})),
            Self::Events => format!("event: error\ndata: {error}\n\n"),
        })
    }
}

/// The position of an event, which a browser gives back when it connects again.
fn cursor(message: &DynamicMessage) -> Option<String> {
    let value = message.get_field_by_name("cursor")?;
    let text = value.as_str()?;
    (!text.is_empty() && !text.contains(['\n', '\r', '\0'])).then(|| text.to_owned())
}

/// proto3's JSON form. Fields without presence are always there: `false`, `0` and empty lists are facts, too.
fn text(message: &DynamicMessage) -> Result<String, Status> {
    let failed = |error: serde_json::Error| {
        Status::internal(format!("{} has no JSON form: {error}", message.descriptor().full_name()))
    };
    let options = SerializeOptions::new().skip_default_fields(false);
    let mut bytes = Vec::new();
    message.serialize_with_options(&mut serde_json::Serializer::new(&mut bytes), &options).map_err(failed)?;
    String::from_utf8(bytes).map_err(|error| Status::internal(error.to_string()))
}

/// One object.
///
/// # Errors
/// A message that has no JSON form.
pub fn one(message: &DynamicMessage) -> Result<Response<Body>, Status> {
    let mut text = text(message)?;
    text.push('\n');
    Ok(status::json(StatusCode::OK, text))
}

/// Messages as they come.
pub type Messages = Pin<Box<dyn Stream<Item = Result<DynamicMessage, Status>> + Send>>;

enum Next {
    Piece(Bytes),
    Last(Bytes),
    End,
}

struct Writing {
    messages: Messages,
    form: Form,
    types: Arc<DescriptorPool>,
    said: Instant,
    over: bool,
}

impl Writing {
    async fn next(&mut self) -> Next {
        let silence = self.said + STILL_THERE;
        let next = tokio::select! {
            next = self.messages.next() => next,
            () = sleep_until(silence), if self.form == Form::Events => {
                return Next::Piece(Bytes::from_static(b": still there\n\n"));
            }
        };
        match next {
            Some(Ok(message)) => match self.form.message(&message) {
                Ok(piece) => Next::Piece(piece),
                Err(status) => Next::Last(self.form.failure(&status, &self.types)),
            },
            Some(Err(status)) => Next::Last(self.form.failure(&status, &self.types)),
            // Browsers take any end for a break and connect again, unless they are told.
            None if self.form == Form::Events => Next::Last(Bytes::from_static(b"event: end\ndata: {}\n\n")),
            None => Next::End,
        }
    }
}

/// A stream. What fails after its beginning is its last object: `{"error": …}`, or an event of that name.
pub fn many(messages: Messages, form: Form, types: Arc<DescriptorPool>) -> Response<Body> {
    let writing = Writing { messages, form, types, said: Instant::now(), over: false };
    let pieces = stream::unfold(writing, |mut writing| async move {
        if writing.over {
            return None;
        }
        let piece = match writing.next().await {
            Next::Piece(piece) => piece,
            Next::Last(piece) => {
                writing.over = true;
                piece
            }
            Next::End => return None,
        };
        writing.said = Instant::now();
        Some((Ok::<_, Infallible>(Frame::data(piece)), writing))
    });
    let mut response = Response::new(Body::new(StreamBody::new(pieces)));
    status::head(response.headers_mut(), form.content_type());
    response
}
