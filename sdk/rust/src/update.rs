//! Changing sandboxes that are there, and templates to make them of.

use torpor_proto::v1::{self, templates_client::TemplatesClient};

use crate::{
    client::{Client, target},
    endpoint::Transport,
    error::Error,
    retry::fill_in,
};

/// Rows asked for at once.
const PAGE: i32 = 100;

impl Client {
    fn template_calls(&self) -> TemplatesClient<Transport> {
        TemplatesClient::new(self.transport())
    }

    /// Changes a sandbox: what the request leaves out is left alone, what is empty in it replaces. Its target names the
    /// version that is meant.
    ///
    /// # Errors
    /// See [`Client`]; ABORTED for a stale version. With the reason UPDATE_PENDING it stopped on the way:
    /// [`Client::resume_pending_update`] goes on.
    pub async fn update(&self, mut request: v1::UpdateSandboxRequest) -> Result<v1::Sandbox, Error> {
        let target = request.target.get_or_insert_default();
        fill_in(&mut target.request_id);
        retried!(self.sandboxes().update(request))
    }

    /// Does what a pending update has not done yet, or gives it up.
    ///
    /// # Errors
    /// See [`Client::update`].
    pub async fn resume_pending_update(&self, sandbox: &str, abandon: bool) -> Result<v1::Sandbox, Error> {
        let request = v1::ResumePendingUpdateRequest { target: Some(target(sandbox)), abandon };
        retried!(self.sandboxes().resume_pending_update(request))
    }

    /// Makes a template.
    ///
    /// # Errors
    /// See [`Client`].
    pub async fn create_template(
        &self,
        mut request: v1::CreateTemplateRequest,
    ) -> Result<v1::Template, Error> {
        fill_in(&mut request.request_id);
        retried!(self.template_calls().create(request))
    }

    /// One template.
    ///
    /// # Errors
    /// See [`Client`].
    pub async fn template(&self, name: &str) -> Result<v1::Template, Error> {
        let request = v1::GetTemplateRequest { template: name.to_owned() };
        retried!(self.template_calls().get(request))
    }

    /// All templates that a label selector chooses (empty: all), by name, through all pages.
    ///
    /// # Errors
    /// See [`Client`]; [`Error::Protocol`] when the pages go round in a circle.
    pub async fn templates(&self, label_selector: &str) -> Result<Vec<v1::Template>, Error> {
        let request = v1::ListTemplatesRequest {
            page_size: PAGE,
            page_token: String::new(),
            label_selector: label_selector.to_owned(),
        };
        all_pages!(self.template_calls().list(request).templates)
    }

    /// Changes a template; the request names the version that is meant.
    ///
    /// # Errors
    /// See [`Client`]; ABORTED for a stale version.
    pub async fn update_template(
        &self,
        mut request: v1::UpdateTemplateRequest,
    ) -> Result<v1::Template, Error> {
        fill_in(&mut request.request_id);
        retried!(self.template_calls().update(request))
    }

    /// Removes a template. True: it was there.
    ///
    /// # Errors
    /// See [`Client`]; NOT_FOUND when it wasn't, unless `allow_missing`.
    pub async fn delete_template(&self, name: &str, allow_missing: bool) -> Result<bool, Error> {
        // Not made again: a repeat of a removal that worked would be told NOT_FOUND.
        let request =
            v1::DeleteTemplateRequest { template: name.to_owned(), allow_missing, expected_version: 0 };
        Ok(self.template_calls().delete(request).await?.into_inner().removed)
    }
}
