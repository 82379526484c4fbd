package kubeapi

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"

	apidiscoveryv2 "k8s.io/api/apidiscovery/v2"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"k8s.io/client-go/kubernetes/scheme"
)

// finder answers /apis, as the aggregator does in a cluster: aggregated, and in the form for kubectl before 1.26.
// finder also forwards uploads. The API server has authenticated every request before finder.
type finder struct {
	next    http.Handler
	groups  http.Handler
	uploads *uploads
}

const aggregatedJSON = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"

func (d *finder) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	path := strings.TrimSuffix(r.URL.Path, "/")
	if strings.HasPrefix(path, "/apis/events.k8s.io/") {
		if err := plainJSON(r); err != nil {
			http.Error(w, err.Error(), http.StatusUnsupportedMediaType)
			return
		}
	}
	if image := uploadTo(r.URL.Path); image != "" {
		d.uploads.serveUpload(w, r, image)
		return
	}
	if path != "/apis" || r.Method != http.MethodGet {
		d.next.ServeHTTP(w, r)
		return
	}
	if strings.Contains(r.Header.Get("Accept"), "as=APIGroupDiscoveryList") {
		d.groups.ServeHTTP(w, r)
		return
	}
	d.legacyGroups(w, r)
}

// legacyGroups turns the aggregated document into an APIGroupList.
func (d *finder) legacyGroups(w http.ResponseWriter, r *http.Request) {
	ask := r.Clone(r.Context())
	ask.Header = http.Header{"Accept": {aggregatedJSON}}
	var doc body
	d.groups.ServeHTTP(&doc, ask)
	var groups apidiscoveryv2.APIGroupDiscoveryList
	if err := json.Unmarshal(doc.data, &groups); err != nil {
		http.Error(w, "discovery: "+err.Error(), http.StatusInternalServerError)
		return
	}
	list := metav1.APIGroupList{TypeMeta: metav1.TypeMeta{Kind: "APIGroupList", APIVersion: "v1"},
		Groups: []metav1.APIGroup{}}
	for _, g := range groups.Items {
		out := metav1.APIGroup{Name: g.Name}
		for _, v := range g.Versions {
			out.Versions = append(out.Versions, metav1.GroupVersionForDiscovery{
				GroupVersion: g.Name + "/" + v.Version, Version: v.Version})
		}
		if len(out.Versions) == 0 {
			continue
		}
		out.PreferredVersion = out.Versions[0]
		list.Groups = append(list.Groups, out)
	}
	writeJSON(w, "application/json", list)
}

func writeJSON(w http.ResponseWriter, contentType string, v any) {
	w.Header().Set("Content-Type", contentType)
	_ = json.NewEncoder(w).Encode(v) // an error means a closed connection
}

// body is a ResponseWriter that keeps the response.
type body struct {
	header http.Header
	data   []byte
}

func (b *body) Header() http.Header {
	if b.header == nil {
		b.header = http.Header{}
	}
	return b.header
}
func (b *body) WriteHeader(int) {}
func (b *body) Write(p []byte) (int, error) {
	b.data = append(b.data, p...)
	return len(p), nil
}

const protobufType = "application/vnd.kubernetes.protobuf"

// plainJSON turns a request about events into JSON, because custom resources have no protobuf: clients use protobuf for
// events as for any built-in kind.
func plainJSON(r *http.Request) error {
	if strings.Contains(r.Header.Get("Accept"), protobufType) {
		r.Header.Set("Accept", "application/json")
	}
	if !strings.HasPrefix(r.Header.Get("Content-Type"), protobufType) || r.Body == nil {
		return nil
	}
	b, err := io.ReadAll(io.LimitReader(r.Body, 1<<20))
	if err := errors.Join(err, r.Body.Close()); err != nil {
		return fmt.Errorf("read event: %w", err)
	}
	obj, _, err := protobuf.NewSerializer(scheme.Scheme, scheme.Scheme).Decode(b, nil, nil)
	if err != nil {
		return fmt.Errorf("decode event: %w", err)
	}
	if b, err = json.Marshal(obj); err != nil {
		return fmt.Errorf("encode event: %w", err)
	}
	r.Body, r.ContentLength = io.NopCloser(bytes.NewReader(b)), int64(len(b))
	r.Header.Set("Content-Type", "application/json")
	return nil
}
