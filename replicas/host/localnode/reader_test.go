package localnode

import (
	"net/http"
	"net/http/httptest"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
)

// A server that does not serve a kind yet does not say that an object is gone; one that does is believed.
func TestSureReader(t *testing.T) {
	known := false
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !known {
			http.NotFound(w, r)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusNotFound)
		_, _ = w.Write([]byte(`{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"NotFound","code":404,` +
			`"message":"volumes.storage.drover.io \"v\" not found","details":{"name":"v","group":"storage.drover.io","kind":"volumes"}}`))
	}))
	defer s.Close()
	scheme := runtime.NewScheme()
	if err := api.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	mapper := meta.NewDefaultRESTMapper(nil)
	mapper.Add(api.GroupVersion.WithKind("Volume"), meta.RESTScopeRoot)
	c, err := client.New(&rest.Config{Host: s.URL}, client.Options{Scheme: scheme, Mapper: mapper})
	if err != nil {
		t.Fatal(err)
	}
	key := client.ObjectKey{Name: "v"}
	if err := c.Get(t.Context(), key, &api.Volume{}); !apierrors.IsNotFound(err) {
		t.Fatalf("without care it is not found: %v", err)
	}
	r := sureReader{c}
	if err := r.Get(t.Context(), key, &api.Volume{}); err == nil || apierrors.IsNotFound(err) ||
		!api.Is(err, api.Unavailable) {
		t.Errorf("a kind that is not served yet: %v", err)
	}
	known = true
	if err := r.Get(t.Context(), key, &api.Volume{}); !apierrors.IsNotFound(err) {
		t.Errorf("an object that is not there: %v", err)
	}
}
