package azure

import (
	"bytes"
	"crypto/hmac"
	"crypto/md5"
	"crypto/sha256"
	"encoding/base64"
	"encoding/xml"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// pageSize is how many blobs a page of a list has.
const pageSize = 500

// server is the part of the blob service that the store uses, with containers in memory. It checks signatures and sums
// as the service does.
type server struct {
	mu         sync.Mutex
	containers map[string]map[string]blobOf
}

type blobOf struct {
	body     []byte
	modified time.Time
}

// startServer starts a server without containers, and returns the endpoint.
func startServer(t *testing.T) string {
	t.Helper()
	s := httptest.NewServer(&server{containers: map[string]map[string]blobOf{}})
	t.Cleanup(s.Close)
	return s.URL
}

// sign is the signature of a request with the account's key, by "Authorize with Shared Key" of the service's reference.
func sign(r *http.Request) string {
	length := ""
	if r.ContentLength > 0 {
		length = strconv.FormatInt(r.ContentLength, 10)
	}
	h := r.Header
	text := strings.Join([]string{r.Method, h.Get("Content-Encoding"), h.Get("Content-Language"), length,
		h.Get("Content-Md5"), h.Get("Content-Type"), "", h.Get("If-Modified-Since"), h.Get("If-Match"),
		h.Get("If-None-Match"), h.Get("If-Unmodified-Since"), h.Get("Range"), ""}, "\n")
	var lines []string
	for name, values := range h {
		if name = strings.ToLower(name); strings.HasPrefix(name, "x-ms-") {
			lines = append(lines, name+":"+strings.Join(values, ",")+"\n")
		}
	}
	slices.Sort(lines)
	text += strings.Join(lines, "") + "/" + account + r.URL.EscapedPath()
	lines = nil
	for name, values := range r.URL.Query() {
		lines = append(lines, "\n"+strings.ToLower(name)+":"+strings.Join(values, ","))
	}
	slices.Sort(lines)
	secret, _ := base64.StdEncoding.DecodeString(key)
	sum := hmac.New(sha256.New, secret)
	_, _ = io.WriteString(sum, text+strings.Join(lines, ""))
	return "SharedKey " + account + ":" + base64.StdEncoding.EncodeToString(sum.Sum(nil))
}

func (s *server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	containerName, name, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, "/"), "/")
	s.mu.Lock()
	defer s.mu.Unlock()
	blobs := s.containers[containerName]
	switch {
	case err != nil: // the client went away
	case r.Header.Get("Authorization") != sign(r):
		answerError(w, http.StatusForbidden, "AuthenticationFailed")
	case name == "" && r.Method == http.MethodPut:
		s.containers[containerName] = map[string]blobOf{}
		w.WriteHeader(http.StatusCreated)
	case blobs == nil:
		answerError(w, http.StatusNotFound, "ContainerNotFound")
	case name == "" && r.FormValue("comp") == "list":
		list(w, r, blobs)
	case r.Method == http.MethodPut:
		put(w, r, blobs, name, body)
	case blobs[name].body == nil:
		answerError(w, http.StatusNotFound, "BlobNotFound")
	case r.Method == http.MethodDelete:
		delete(blobs, name)
		w.WriteHeader(http.StatusAccepted)
	default:
		get(w, r, blobs[name])
	}
}

func put(w http.ResponseWriter, r *http.Request, blobs map[string]blobOf, name string, body []byte) {
	sum := md5.Sum(body)
	switch {
	case r.Header.Get("x-ms-blob-type") != "BlockBlob":
		answerError(w, http.StatusBadRequest, "InvalidHeaderValue")
	case r.Header.Get("Content-Md5") != base64.StdEncoding.EncodeToString(sum[:]):
		answerError(w, http.StatusBadRequest, "Md5Mismatch")
	default:
		blobs[name] = blobOf{append(make([]byte, 0, len(body)), body...), time.Now()}
		w.WriteHeader(http.StatusCreated)
	}
}

// get answers a GET or HEAD; the range is in the header of the service.
func get(w http.ResponseWriter, r *http.Request, b blobOf) {
	r.Header.Set("Range", r.Header.Get("x-ms-range"))
	first, _, _ := strings.Cut(strings.TrimPrefix(r.Header.Get("Range"), "bytes="), "-")
	if off, err := strconv.ParseInt(first, 10, 64); err == nil && off >= int64(len(b.body)) {
		answerError(w, http.StatusRequestedRangeNotSatisfiable, "InvalidRange")
		return
	}
	http.ServeContent(w, r, "", b.modified, bytes.NewReader(b.body))
}

// list answers with a page of the blobs with a prefix; the marker is the first name of the page.
func list(w http.ResponseWriter, r *http.Request, blobs map[string]blobOf) {
	var names []string
	for name := range blobs {
		if strings.HasPrefix(name, r.FormValue("prefix")) && name >= r.FormValue("marker") {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	next := ""
	if len(names) > pageSize {
		names, next = names[:pageSize], names[pageSize]
	}
	w.Header().Set("Content-Type", "application/xml")
	fmt.Fprint(w, xml.Header, "<EnumerationResults><Blobs>")
	for _, name := range names {
		fmt.Fprintf(w, "<Blob><Name>%s</Name><Properties><Last-Modified>%s</Last-Modified>"+
			"<Content-Length>%d</Content-Length></Properties></Blob>", name,
			blobs[name].modified.UTC().Format(http.TimeFormat), len(blobs[name].body))
	}
	fmt.Fprintf(w, "</Blobs><NextMarker>%s</NextMarker></EnumerationResults>", next)
}
