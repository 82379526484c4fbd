package kubeapi_test

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	eventsv1 "k8s.io/api/events/v1"
	apixv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apiextensions-apiserver/pkg/client/clientset/clientset"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientscheme "k8s.io/client-go/kubernetes/scheme"
	eventsclient "k8s.io/client-go/kubernetes/typed/events/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrllog "sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"drover.io/drover/api"
	"drover.io/drover/block/suite"
	"drover.io/drover/driver/kubeapi"
)

// childDir makes the test binary a server, which a test kills.
const childDir = "DROVER_TEST_KUBEAPI_DIR"

func TestMain(m *testing.M) {
	if dir := os.Getenv(childDir); dir != "" {
		if _, err := kubeapi.Start(context.Background(), kubeapi.Options{Dir: dir}); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		fmt.Println("ready")
		select {}
	}
	suite.SystemMain()
	klog.LogToStderr(false)
	klog.SetOutput(io.Discard)
	ctrllog.SetLogger(logr.Discard())
	os.Exit(m.Run())
}

func start(t testing.TB, o kubeapi.Options) (*kubeapi.Server, func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	began := time.Now()
	s, err := kubeapi.Start(ctx, o)
	if err != nil {
		cancel()
		t.Fatal(err)
	}
	t.Logf("ready in %v", time.Since(began).Round(time.Millisecond))
	stop := func() {
		began := time.Now()
		cancel()
		if err := s.Wait(); err != nil {
			t.Errorf("Wait: %v", err)
		}
		d := time.Since(began)
		if t.Logf("stopped in %v", d.Round(time.Millisecond)); d > 50*time.Second { // a minute: connections stayed open
			t.Errorf("stop took %v", d)
		}
	}
	t.Cleanup(stop)
	return s, stop
}

func newClient(t testing.TB, cfg *rest.Config) client.WithWatch {
	t.Helper()
	scheme := runtime.NewScheme()
	if err := errors.Join(api.AddToScheme(scheme), clientscheme.AddToScheme(scheme)); err != nil {
		t.Fatal(err)
	}
	c, err := client.NewWithWatch(cfg, client.Options{Scheme: scheme})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func setting(name, value string) *api.Setting {
	return &api.Setting{ObjectMeta: metav1.ObjectMeta{Name: name}, Value: value}
}

// anything is an object of a kind which allows every name.
func anything(name, value string) *api.Node {
	return &api.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: map[string]string{"value": value}}}
}

func TestStateSurvivesARestart(t *testing.T) {
	dir := filepath.Join(t.TempDir(), strings.Repeat("a-long-name", 15))
	ctx := t.Context()
	s, stop := start(t, kubeapi.Options{Dir: dir})
	if err := newClient(t, s.Config).Create(ctx, setting("default-replica-count", "1")); err != nil {
		t.Fatal(err)
	}
	kubeconfig, err := os.ReadFile(s.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	stop()

	s, _ = start(t, kubeapi.Options{Dir: dir})
	again, err := os.ReadFile(s.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	if string(again) != string(kubeconfig) {
		t.Error("the kubeconfig changed over a restart")
	}
	cfg, err := clientcmd.RESTConfigFromKubeConfig(kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	var got api.Setting
	if err := newClient(t, cfg).Get(ctx, client.ObjectKey{Name: "default-replica-count"}, &got); err != nil {
		t.Fatal(err)
	}
	if got.Value != "1" {
		t.Errorf("value %q, want 1", got.Value)
	}
	for _, name := range []string{"kubeconfig", "pki/token", "pki/ca.pem"} {
		st, err := os.Stat(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		if st.Mode().Perm() != 0o600 {
			t.Errorf("%s has mode %v, want 0600", name, st.Mode())
		}
	}
	late := time.After(2 * time.Minute)
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for { // taken soon after the start
		if snaps, _ := filepath.Glob(filepath.Join(dir, "etcd-snapshots", "state-*.db")); len(snaps) > 0 {
			return
		}
		select {
		case <-tick.C:
		case <-late:
			t.Fatal("no snapshot of the state database")
		}
	}
}

func TestStateSurvivesKill(t *testing.T) {
	dir := t.TempDir()
	for round := range 3 {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), childDir+"="+dir)
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		var word string
		if _, err := fmt.Fscan(out, &word); err != nil || word != "ready" {
			t.Errorf("child said %q, %v", word, err)
		}
		cfg, err := clientcmd.BuildConfigFromFlags("", filepath.Join(dir, "kubeconfig"))
		if err == nil {
			c := newClient(t, cfg)
			for i := range 20 {
				if err = c.Create(t.Context(), anything(fmt.Sprintf("s-%d-%d", round, i), "x")); err != nil {
					break
				}
			}
		}
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if err != nil {
			t.Fatal(err)
		}
	}
	s, _ := start(t, kubeapi.Options{Dir: dir})
	var list api.NodeList
	if err := newClient(t, s.Config).List(t.Context(), &list); err != nil {
		t.Fatal(err)
	}
	if len(list.Items) != 60 {
		t.Errorf("%d objects after three kills, want 60", len(list.Items))
	}
}

// TestDefinitionsAreOldEnough: the API server of k8s.io/apiextensions-apiserver delays each creation of an object with
// a definition younger than 2 s. The embedded server is alone, so the definitions count as older from the start.
func TestDefinitionsAreOldEnough(t *testing.T) {
	s, _ := start(t, kubeapi.Options{Dir: t.TempDir(), Volatile: true})
	started := time.Now()
	cs, err := clientset.NewForConfig(s.Config)
	if err != nil {
		t.Fatal(err)
	}
	list, err := cs.ApiextensionsV1().CustomResourceDefinitions().List(t.Context(), metav1.ListOptions{})
	if err != nil || len(list.Items) == 0 {
		t.Fatalf("%d definitions, %v", len(list.Items), err)
	}
	for _, crd := range list.Items {
		for _, c := range crd.Status.Conditions {
			if old := started.Sub(c.LastTransitionTime.Time); c.Type == apixv1.Established && old < 2*time.Second {
				t.Errorf("definition %s is %v old", crd.Name, old)
			}
		}
	}
}

func TestOneServerPerFolder(t *testing.T) {
	dir := t.TempDir()
	start(t, kubeapi.Options{Dir: dir})
	_, err := kubeapi.Start(t.Context(), kubeapi.Options{Dir: dir})
	if !api.Is(err, api.InUse) || !strings.Contains(err.Error(), dir) {
		t.Errorf("second server in one folder: %v, want kind in use and the folder's name", err)
	}
}

func TestValidation(t *testing.T) {
	s, _ := start(t, kubeapi.Options{Dir: t.TempDir()})
	c := newClient(t, s.Config)
	img := &api.BackingImage{ObjectMeta: metav1.ObjectMeta{Name: "i"}, Spec: api.BackingImageSpec{
		SourceType: api.SourceDownload, SourceParameters: map[string]string{"url": "http://a/b"}}}
	if err := c.Create(t.Context(), img); err != nil {
		t.Fatal(err)
	}
	img.Spec.SourceParameters = map[string]string{"url": "http://c/d"}
	if err := c.Update(t.Context(), img); err == nil || !strings.Contains(err.Error(), "sourceParameters cannot change") {
		t.Errorf("changed source: %v, want it refused", err)
	}
}

func httpClient() *http.Client {
	return &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}}
}

func get(t *testing.T, s *kubeapi.Server, path, token, accept string) (int, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, s.Config.Host+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+token)
	req.Header.Set("Accept", accept)
	h := httpClient()
	defer h.CloseIdleConnections()
	resp, err := h.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	b, err := io.ReadAll(resp.Body)
	if err := errors.Join(err, resp.Body.Close()); err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(b)
}

func TestOnlyTheTokenOpens(t *testing.T) {
	s, _ := start(t, kubeapi.Options{Dir: t.TempDir()})
	const path = "/apis/storage.drover.io/v1alpha1/volumes"
	if code, b := get(t, s, path, s.Config.BearerToken, "application/json"); code != 200 {
		t.Errorf("with the token: %d %s", code, b)
	}
	for _, token := range []string{"", "x", s.Config.BearerToken + "0", s.Config.BearerToken[1:]} {
		if code, _ := get(t, s, path, token, "application/json"); code != 401 && code != 403 {
			t.Errorf("token %q: %d, want it refused", token, code)
		}
	}
}

func TestDiscoveryOldAndNew(t *testing.T) {
	s, _ := start(t, kubeapi.Options{Dir: t.TempDir()})
	token := s.Config.BearerToken
	_, b := get(t, s, "/apis", token, "application/json, */*")
	var groups metav1.APIGroupList
	if err := json.Unmarshal([]byte(b), &groups); err != nil {
		t.Fatal(err, b)
	}
	found := map[string]string{}
	for _, g := range groups.Groups {
		found[g.Name] = g.PreferredVersion.GroupVersion
	}
	want := map[string]string{"storage.drover.io": "storage.drover.io/v1alpha1", "events.k8s.io": "events.k8s.io/v1",
		"apiextensions.k8s.io": "apiextensions.k8s.io/v1"}
	for g, v := range want {
		if found[g] != v {
			t.Errorf("group %s: preferred version %q, want %q", g, found[g], v)
		}
	}
	if _, b = get(t, s, "/api", token, "application/json"); !strings.Contains(b, `"APIVersions"`) {
		t.Errorf("/api: %s", b)
	}
	const list = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
	for _, path := range []string{"/api", "/apis"} {
		if _, b = get(t, s, path, token, list); !strings.Contains(b, `"APIGroupDiscoveryList"`) {
			t.Errorf("%s, aggregated: %s", path, b)
		}
	}
	if _, b = get(t, s, "/apis/storage.drover.io/v1alpha1", token, "application/json"); !strings.Contains(b, `"volumes"`) {
		t.Errorf("resources of the group: %s", b)
	}
}

func kubectl(t *testing.T, s *kubeapi.Server, args ...string) string {
	t.Helper()
	cmd := exec.Command("kubectl", append([]string{"--kubeconfig", s.Kubeconfig}, args...)...)
	cmd.Env = append(os.Environ(), "HOME="+t.TempDir())
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Errorf("kubectl %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return string(out)
}

func TestKubectl(t *testing.T) {
	if _, err := exec.LookPath("kubectl"); err != nil {
		t.Skip("no kubectl here")
	}
	s, _ := start(t, kubeapi.Options{Dir: t.TempDir()})
	c := newClient(t, s.Config)
	if err := c.Create(t.Context(), setting("default-replica-count", "1")); err != nil {
		t.Fatal(err)
	}
	for want, args := range map[string][]string{
		"default-replica-count": {"get", "settings"},
		"No resources found":    {"get", "volumes,backingimages"},
		"backingimages":         {"api-resources"},
		"sourceParameters":      {"explain", "backingimage.spec"},
		"patched":               {"patch", "settings", "default-replica-count", "--type=merge", "-p", `{"value":"2"}`},
	} {
		if out := kubectl(t, s, args...); !strings.Contains(out, want) {
			t.Errorf("kubectl %s: no %q in\n%s", strings.Join(args, " "), want, out)
		}
	}
	err := c.Create(t.Context(), setting("storage-over-provisionning-percentage", "150"))
	if err == nil || !strings.Contains(err.Error(), "unknown setting; the known ones are ") ||
		!strings.Contains(err.Error(), ", default-replica-count, ") {
		t.Errorf("a setting that there is not: %v", err)
	}
	if out := kubectl(t, s, "delete", "setting", "default-replica-count"); !strings.Contains(out, "deleted") {
		t.Error(out)
	}
}

func TestEvents(t *testing.T) {
	s, _ := start(t, kubeapi.Options{Dir: t.TempDir(), MaintainEvery: 200 * time.Millisecond, MaxEvents: 3})
	ctx, cancel := context.WithCancel(t.Context())
	c := newClient(t, s.Config)
	mgr, err := manager.New(s.Config, manager.Options{Scheme: c.Scheme(),
		Metrics: metricsserver.Options{BindAddress: "0"}})
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- mgr.Start(ctx) }()
	defer func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}()
	obj := anything("x", "1")
	if err := c.Create(ctx, obj); err != nil {
		t.Fatal(err)
	}
	w, err := c.Watch(ctx, &eventsv1.EventList{})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Stop()
	mgr.GetEventRecorder("test").Eventf(obj, nil, "Warning", "Because", "Test", "a note on %s", obj.Name)
	await := func(what string, ok func(kind string, e *eventsv1.Event) bool) {
		t.Helper()
		for {
			select {
			case ev := <-w.ResultChan():
				if e, is := ev.Object.(*eventsv1.Event); is && ok(string(ev.Type), e) {
					return
				}
			case <-time.After(2 * time.Minute):
				t.Fatalf("no %s", what)
			}
		}
	}
	await("recorded event", func(kind string, e *eventsv1.Event) bool {
		return kind == "ADDED" && e.Note == "a note on x" && e.Regarding.Name == "x"
	})
	if _, err := exec.LookPath("kubectl"); err == nil {
		for _, want := range []struct {
			line string
			args []string
		}{
			{"Because", []string{"describe", "node.storage.drover.io", "x"}},
			{"Node/x", []string{"events", "-A"}},
			{"a note on x", []string{"get", "events", "-A", "--field-selector", "involvedObject.name=x,type=Warning"}},
			{"a note on x", []string{"get", "events.events.k8s.io", "-A"}},
			{"involvedObject", []string{"explain", "events"}},
		} {
			if out := kubectl(t, s, want.args...); !strings.Contains(out, want.line) {
				t.Errorf("kubectl %s: no %q in\n%s", strings.Join(want.args, " "), want.line, out)
			}
		}
		out := kubectl(t, s, "get", "events", "-A", "--field-selector", "involvedObject.name=y")
		if strings.Contains(out, "note") {
			t.Errorf("events of y:\n%s", out)
		}
	}
	ec, err := eventsclient.NewForConfig(s.Config)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 5 {
		e := &eventsv1.Event{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("e", i), Namespace: "default"},
			EventTime: metav1.NowMicro(), Reason: "r", Type: "Normal", Action: "a", ReportingController: "t",
			ReportingInstance: "t"}
		if _, err := ec.Events("default").Create(ctx, e, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	gone := 0
	await("pruning to three events", func(kind string, _ *eventsv1.Event) bool {
		if kind == "DELETED" {
			gone++
		}
		return gone == 3
	})
}
