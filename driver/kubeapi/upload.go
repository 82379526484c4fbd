package kubeapi

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/runtime"
	apirequest "k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
)

// uploads forwards a request to api.UploadPath to the node that takes the upload, and forwards the answer. Every user
// of the API may upload, and needs neither the node's address nor a route to the node.
type uploads struct {
	objects client.Client
}

func newUploads(cfg *rest.Config) (*uploads, error) {
	scheme := runtime.NewScheme()
	if err := api.AddToScheme(scheme); err != nil {
		return nil, err
	}
	c, err := client.New(cfg, client.Options{Scheme: scheme})
	return &uploads{c}, err
}

// uploadTo returns the image of an upload path, or "".
func uploadTo(path string) string {
	parts := strings.Split(path, "/")
	if len(parts) != strings.Count(api.UploadPath(""), "/")+1 {
		return ""
	}
	if name := parts[len(parts)-2]; path == api.UploadPath(name) {
		return name
	}
	return ""
}

// longRunning exempts uploads from the request timeout.
func longRunning(is apirequest.LongRunningRequestCheck) apirequest.LongRunningRequestCheck {
	return func(r *http.Request, info *apirequest.RequestInfo) bool {
		return uploadTo(r.URL.Path) != "" || is(r, info)
	}
}

func (u *uploads) serveUpload(w http.ResponseWriter, r *http.Request, image string) {
	refuse := func(code int, err error) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(code)
		_ = json.NewEncoder(w).Encode(map[string]string{"state": string(api.ImageFailed), "message": err.Error()})
	}
	var copies api.ImageCopyList
	of := client.MatchingLabels{api.LabelImage: api.LabelValue(image)}
	if err := u.objects.List(r.Context(), &copies, of); err != nil {
		refuse(http.StatusServiceUnavailable, err)
		return
	}
	for i := range copies.Items {
		c := &copies.Items[i]
		if c.Spec.Image != image || c.Status.UploadURL == "" || c.DeletionTimestamp != nil {
			continue
		}
		if err := forwardUpload(w, r, c, refuse); err != nil {
			refuse(http.StatusBadGateway, err)
		}
		return
	}
	refuse(http.StatusNotFound, api.Errorf(api.NotFound, "no upload of an image %q is expected", image))
}

// forwardUpload sends the request to the upload address of the copy. The copy's status has the authority of the
// address.
func forwardUpload(w http.ResponseWriter, r *http.Request, c *api.ImageCopy, refuse func(int, error)) error {
	to, err := url.Parse(c.Status.UploadURL)
	if err != nil {
		return fmt.Errorf("the address of the upload: %w", err)
	}
	trust := &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: x509.NewCertPool()}
	trust.RootCAs.AppendCertsFromPEM([]byte(c.Status.UploadCA))
	// Uploads are few, and the node also closes the connection, so each request has its own connection.
	tr := &http.Transport{TLSClientConfig: trust, DisableKeepAlives: true, ExpectContinueTimeout: time.Second,
		TLSHandshakeTimeout: 10 * time.Second,
		WriteBufferSize:     256 << 10, DialContext: (&net.Dialer{Timeout: 10 * time.Second}).DialContext}
	defer tr.CloseIdleConnections()
	(&httputil.ReverseProxy{
		Rewrite: func(p *httputil.ProxyRequest) {
			query := p.In.URL.RawQuery
			p.Out.URL, p.Out.Host = to, to.Host
			p.Out.URL.RawQuery = query
			p.Out.Header.Del("Authorization") // credentials for this server alone
			p.Out.Header.Del("Cookie")
		},
		Transport: tr,
		ErrorLog:  log.New(io.Discard, "", 0), // the client receives the error
		ErrorHandler: func(_ http.ResponseWriter, _ *http.Request, err error) {
			refuse(http.StatusBadGateway, fmt.Errorf("node %s takes the upload and was not reached, or cut it: %w",
				c.Spec.Node, err))
		},
	}).ServeHTTP(w, r)
	return nil
}
