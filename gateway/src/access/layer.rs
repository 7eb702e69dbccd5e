//! Stands before every service: finds the caller, asks the table, writes the audit log.

use std::{
    convert::Infallible,
    future::Future,
    pin::Pin,
    sync::{Arc, PoisonError},
    task::{Context, Poll},
    time::{Instant, SystemTime},
};

use http::{HeaderMap, Request, Response};
use http_body::Frame;
use tokio_util::sync::CancellationToken;
use tonic::{Status, body::Body};
use torpor_sandbox::id::clip;
use tower::Service;

use super::{Access, Caller, Grant, Identity, Need, Peer, methods, usual_workspace, workspace_name};
use crate::{
    api::{refused, to_status},
    error::{ApiError, Code},
};

/// Metadata that names the workspace a call works in.
pub const WORKSPACE: &str = "x-torpor-workspace";

/// A service that is called only by those who may.
#[derive(Clone)]
pub struct Guard<S> {
    inner: S,
    access: Arc<Access>,
}

impl<S> Guard<S> {
    /// Guards a service.
    pub fn new(inner: S, access: Arc<Access>) -> Self {
        Self { inner, access }
    }
}

/// Why a call is not let in, and whose it is, if that is known.
struct Refusal {
    error: ApiError,
    whose: Option<Box<Identity>>,
}

impl From<ApiError> for Refusal {
    fn from(error: ApiError) -> Self {
        Self { error, whose: None }
    }
}

impl Refusal {
    /// Written down where the call would have changed something. Strangers write nothing to the log: they could fill it.
    fn noted(self, access: &Access, path: &str, peer: Option<&Peer>) -> ApiError {
        let changes = methods::of_path(path).is_some_and(|method| method.changes);
        if let Some(whose) = self.whose.filter(|_| changes && self.error.code == Code::PermissionDenied) {
            access.audit.refused(path, &peer.map(Peer::address).unwrap_or_default(), &whose, &self.error);
        }
        self.error
    }
}

/// Checks all that is known before the message is read.
async fn admit(
    access: &Arc<Access>,
    path: &str,
    headers: &HeaderMap,
    peer: Option<&Peer>,
) -> Result<Caller, Refusal> {
    let method = methods::of_path(path).ok_or_else(|| {
        if let Some(error) = refused(path) {
            return error;
        }
        let message = format!("this gateway has no method {}", clip(path).escape_debug());
        ApiError::new(Code::Unimplemented, "NO_SUCH_METHOD", message)
    })?;
    let Some(peer) = peer else {
        return Err(ApiError::internal("a connection that says nothing of its other end").into());
    };
    let identity = match access.identify(headers, peer).await {
        Ok(Some(identity)) => identity,
        Ok(None) if method.need != Need::Nothing => {
            let message = "the call says nothing of who makes it";
            return Err(ApiError::new(Code::Unauthenticated, "UNAUTHENTICATED", message)
                .with("next", "give a token: --token-file FILE or TORPOR_TOKEN")
                .into());
        }
        // Whoever it is may ask.
        Ok(None) => Identity {
            subject: "nobody".to_owned(),
            by: super::By::Plaintext,
            grant: Grant::Membership,
            home: None,
            expires: None,
        },
        Err(error) => return Err(error.into()),
    };
    let refused = |what: &str| {
        let message = format!("{} may not call {}: {what}", identity.subject, method.path);
        let error = ApiError::new(Code::PermissionDenied, "PERMISSION_DENIED", message);
        Err(Refusal { error, whose: Some(Box::new(identity.clone())) })
    };
    match (&identity.grant, method.need) {
        (Grant::Sandbox(_), _) if !method.from_within => {
            return refused("a sandbox's token is good for a few calls about that sandbox");
        }
        (Grant::Admin, _) | (_, Need::Nothing | Need::Identity | Need::Role(_)) => {}
        _ => return refused("it is for the gateway's administrators"),
    }
    let workspace = match headers.get(WORKSPACE) {
        Some(value) => workspace_name(value.to_str().unwrap_or_default())?,
        None => identity.home.clone().unwrap_or_else(usual_workspace),
    };
    Ok(Caller { identity, method, workspace, access: access.clone(), named: Arc::default() })
}

/// Finds the caller and has its call ended with its rights, also with those that are changed in between.
async fn join(
    access: &Arc<Access>,
    path: &str,
    headers: &HeaderMap,
    peer: Option<&Peer>,
) -> Result<(Caller, Arc<CancellationToken>), Refusal> {
    loop {
        let changes = access.changes();
        let caller = admit(access, path, headers, peer).await?;
        let shrank = access.joined(&caller.identity.subject);
        if access.changes() == changes {
            return Ok((caller, shrank));
        }
    }
}

impl Access {
    /// Whether a call would be let in, by all that is known before its message is read.
    ///
    /// # Errors
    /// Why not.
    pub async fn admits(
        self: &Arc<Self>,
        path: &str,
        headers: &HeaderMap,
        peer: Option<&Peer>,
    ) -> Result<(), ApiError> {
        admit(self, path, headers, peer).await.map(drop).map_err(|refusal| refusal.noted(self, path, peer))
    }
}

const RIGHTS_ENDED: &str = "the rights that this call was let in with have ended";

/// The status that an answer begins with; one that comes later is not known here.
fn outcome(response: &Response<Body>) -> String {
    match response.headers().get("grpc-status").map(|status| status.to_str().unwrap_or("?")) {
        Some("0") | None => "ok".to_owned(),
        Some(code) => code.to_owned(),
    }
}

/// A call under way, for the audit log: one whose caller goes away is written down as well, since what it asked for may
/// be done all the same.
struct Noted {
    access: Arc<Access>,
    caller: Caller,
    from: String,
    begun: Instant,
    outcome: Option<String>,
}

impl Drop for Noted {
    fn drop(&mut self) {
        if self.caller.method.changes {
            let outcome = self.outcome.as_deref().unwrap_or("caller went away");
            let named = self.caller.named.lock().unwrap_or_else(PoisonError::into_inner).clone();
            self.access.audit.called(&self.caller, &self.from, &named, outcome, self.begun.elapsed());
        }
    }
}

/// An answer that ends when its caller's rights do.
struct Bounded {
    inner: Body,
    ended: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
}

/// Ends with the rights of a caller: they shrank, or what it is known by has expired.
async fn rights_end(shrank: Arc<CancellationToken>, expires: Option<SystemTime>) {
    let left = expires.map(|at| at.duration_since(SystemTime::now()).unwrap_or_default());
    tokio::select! {
        () = shrank.cancelled() => {}
        () = async {
            match left {
                Some(left) => tokio::time::sleep(left).await,
                None => std::future::pending().await,
            }
        } => {}
    }
}

/// A question that breaks off when its caller's rights end, whether or not the caller takes the answer.
struct Heard {
    inner: Body,
    ended: Pin<Box<dyn Future<Output = ()> + Send>>,
}

impl http_body::Body for Heard {
    type Data = bytes::Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<bytes::Bytes>, Status>>> {
        if self.ended.as_mut().poll(context).is_ready() {
            self.ended = Box::pin(std::future::ready(()));
            return Poll::Ready(Some(Err(Status::unauthenticated(RIGHTS_ENDED))));
        }
        // tonic takes a cancelled request for one that has ended: half of an input for the whole.
        Pin::new(&mut self.inner).poll_frame(context).map_err(|status| match status.code() {
            tonic::Code::Cancelled => Status::aborted("the caller broke off"),
            _ => status,
        })
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> http_body::SizeHint {
        self.inner.size_hint()
    }
}

impl http_body::Body for Bounded {
    type Data = bytes::Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<bytes::Bytes>, Status>>> {
        // What is there already is given: a caller may have revoked its own token.
        if let Poll::Ready(frame) = Pin::new(&mut self.inner).poll_frame(context) {
            return Poll::Ready(frame);
        }
        match self.ended.as_mut().map(|ended| ended.as_mut().poll(context)) {
            Some(Poll::Ready(())) => {
                self.ended = None;
                self.inner = Body::empty();
                let error = ApiError::new(Code::Unauthenticated, "RIGHTS_ENDED", RIGHTS_ENDED);
                let head = to_status(error).into_http::<Body>();
                Poll::Ready(Some(Ok(Frame::trailers(head.headers().clone()))))
            }
            _ => Poll::Pending,
        }
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }
}

impl<S> Service<Request<Body>> for Guard<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible> + Clone + Send + 'static,
    S::Future: Send,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let ready = self.inner.clone();
        let mut inner = std::mem::replace(&mut self.inner, ready);
        let access = self.access.clone();
        Box::pin(async move {
            let (mut parts, body) = request.into_parts();
            let (path, peer) = (parts.uri.path(), parts.extensions.get::<Peer>());
            let from = peer.map(Peer::address).unwrap_or_default();
            let (caller, shrank) = match join(&access, path, &parts.headers, peer).await {
                Ok(joined) => joined,
                Err(refusal) => return Ok(to_status(refusal.noted(&access, path, peer)).into_http()),
            };
            parts.extensions.insert(caller.clone());
            let expires = caller.identity.expires;
            let (ended, unheard) = (rights_end(shrank.clone(), expires), rights_end(shrank, expires));
            let body = Body::new(Heard { inner: body, ended: Box::pin(unheard) });
            let mut noted = Noted { access, caller, from, begun: Instant::now(), outcome: None };
            let response = inner.call(Request::from_parts(parts, body)).await?;
            noted.outcome = Some(outcome(&response));
            Ok(response.map(|inner| Body::new(Bounded { inner, ended: Some(Box::pin(ended)) })))
        })
    }
}
