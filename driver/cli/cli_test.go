package cli_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/await"
	"drover.io/drover/block/suite"
	"drover.io/drover/driver/cli"
	"drover.io/drover/driver/kubeapi"
)

// A real API server serves all tests; each test uses names of its own. The tests stand in for the other roles: they
// write the statuses of controller, node and data.
var (
	server *kubeapi.Server
	store  client.WithWatch
)

func TestMain(m *testing.M) {
	suite.SystemMain()
	os.Exit(func() int {
		klog.LogToStderr(false)
		klog.SetOutput(io.Discard)
		dir, err := os.MkdirTemp("", "drover-cli-")
		if err != nil {
			panic(err)
		}
		defer os.RemoveAll(dir)
		ctx, stop := context.WithCancel(context.Background())
		defer stop()
		server, err = kubeapi.Start(ctx, kubeapi.Options{Dir: dir, Volatile: true, Log: slog.New(slog.DiscardHandler)})
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		defer func() {
			stop()
			_ = server.Wait()
		}()
		s := runtime.NewScheme()
		if err := errors.Join(api.AddToScheme(s), corev1.AddToScheme(s), eventsv1.AddToScheme(s)); err != nil {
			panic(err)
		}
		if store, err = client.NewWithWatch(server.Config, client.Options{Scheme: s}); err != nil {
			panic(err)
		}
		node := &api.Node{}
		node.Name = "here"
		if err := store.Create(ctx, node); err != nil {
			panic(err)
		}
		return m.Run()
	}())
}

// result is the user's view of a command.
type result struct {
	out, err string
	code     int
}

func drover(t *testing.T, argv ...string) result {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	return droverIn(ctx, argv...)
}

func droverIn(ctx context.Context, argv ...string) result {
	var errOut bytes.Buffer
	r := droverTo(ctx, &errOut, argv...)
	r.err = errOut.String()
	return r
}

// droverTo runs a command and writes remarks to errOut meanwhile.
func droverTo(ctx context.Context, errOut io.Writer, argv ...string) result {
	var out bytes.Buffer
	root := &cobra.Command{Use: "drover", SilenceErrors: true, SilenceUsage: true}
	root.AddCommand(cli.Commands(nil)...)
	root.SetOut(&out)
	root.SetErr(errOut)
	root.SetArgs(argv)
	code := cli.Report(errOut, root.ExecuteContext(ctx))
	return result{out: out.String(), code: code}
}

// mustSay fails unless the command ended with the code and printed all the words.
func (r result) mustSay(t *testing.T, code int, words ...string) {
	t.Helper()
	if r.code != code {
		t.Fatalf("exit code %d, want %d\nstdout: %s\nstderr: %s", r.code, code, r.out, r.err)
	}
	for _, w := range words {
		if !strings.Contains(r.out+r.err, w) {
			t.Errorf("no %q in\nstdout: %s\nstderr: %s", w, r.out, r.err)
		}
	}
}

// pen plays the writer of an object's status: pen waits for the object, calls write and stores the status.
func pen[T client.Object](t *testing.T, name string, write func(T)) {
	t.Helper()
	failed := make(chan error, 1)
	go func() { failed <- status(t.Context(), name, write) }()
	t.Cleanup(func() {
		if err := <-failed; err != nil && !errors.Is(err, context.Canceled) {
			t.Errorf("status of %s: %v", name, err)
		}
	})
}

// status waits for the object to exist and writes the status.
func status[T client.Object](ctx context.Context, name string, write func(T)) error {
	for {
		obj, err := await.Until(ctx, store, name, func(T) (bool, error) { return true, nil })
		if err == nil {
			write(obj)
			if err = store.Status().Update(ctx, obj); !apierrors.IsConflict(err) {
				return err
			}
			continue
		}
		if client.IgnoreNotFound(err) != nil {
			return err
		}
		if err := created[T](ctx, name); err != nil {
			return err
		}
	}
}

// created waits until an object of the name is created.
func created[T client.Object](ctx context.Context, name string) error {
	var zero T
	var list client.ObjectList
	switch any(zero).(type) {
	case *api.Volume:
		list = &api.VolumeList{}
	case *api.BackingImage:
		list = &api.BackingImageList{}
	case *api.Attachment:
		list = &api.AttachmentList{}
	case *api.BackupTarget:
		list = &api.BackupTargetList{}
	case *api.Backup:
		list = &api.BackupList{}
	case *api.BackupBackingImage:
		list = &api.BackupBackingImageList{}
	default:
		return fmt.Errorf("no pen for %T", zero)
	}
	w, err := store.Watch(ctx, list, client.MatchingFields{"metadata.name": name})
	if err != nil {
		return err
	}
	defer w.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-w.ResultChan():
		return nil
	}
}

func kubeconfig(argv ...string) []string { return append(argv, "--kubeconfig", server.Kubeconfig) }

func TestCommandsInEveryForm(t *testing.T) {
	v := &api.Volume{Spec: api.VolumeSpec{Size: 10 << 20}}
	v.Name = "forms"
	if err := store.Create(t.Context(), v); err != nil {
		t.Fatal(err)
	}
	drover(t, kubeconfig("volume", "list")...).mustSay(t, 0, "NAME", "forms", "10 MiB")
	drover(t, kubeconfig("volume", "show", "forms", "-o", "name")...).mustSay(t, 0, "volume.storage.drover.io/forms\n")
	drover(t, kubeconfig("volume", "show", "forms", "-o", "yaml")...).mustSay(t, 0, "apiVersion: storage.drover.io/v1alpha1", "kind: Volume")
	r := drover(t, kubeconfig("volume", "list", "-o", "json")...)
	r.mustSay(t, 0)
	var list api.VolumeList
	if err := json.Unmarshal([]byte(r.out), &list); err != nil || list.Kind != "VolumeList" || len(list.Items) == 0 ||
		list.Items[0].Kind != "Volume" {
		t.Errorf("volume list -o json: %v, %+v", err, list.TypeMeta)
	}
	drover(t, kubeconfig("volume", "list", "-o", "xml")...).mustSay(t, 2, "table, wide, json, yaml or name")
	drover(t, kubeconfig("node", "list")...).mustSay(t, 0, "here")
	drover(t, kubeconfig("node", "show")...).mustSay(t, 0, "here", "Disks:")
	drover(t, "version").mustSay(t, 0, "drover ")
}

func TestWrongUse(t *testing.T) {
	drover(t, kubeconfig("volume", "create")...).mustSay(t, 2, "usage: drover volume create NAME")
	drover(t, kubeconfig("volume", "create", "x")...).mustSay(t, 2, "--size 10Gi")
	drover(t, kubeconfig("volume", "create", "Not_A_Name", "--size", "1Gi")...).mustSay(t, 2, "lower-case")
	drover(t, kubeconfig("volume", "create", "x", "--size", "much")...).mustSay(t, 2, `"much" is not a size`)
	drover(t, kubeconfig("volume", "grow", "x")...).mustSay(t, 2, `no command "grow"`)
	drover(t, kubeconfig("volume", "show", "nosuch")...).mustSay(t, 3, "drover volume list")
	drover(t, kubeconfig("image", "import", "ftp://a.example/b.img")...).mustSay(t, 2, "http, https or docker")
	drover(t, kubeconfig("image", "import", "/nosuch.qcow2")...).mustSay(t, 3, "/nosuch.qcow2")
	drover(t, kubeconfig("image", "import", "/etc/passwd", "--checksum", "abc")...).mustSay(t, 2, "128 hex digits")
	drover(t, kubeconfig("volume", "create", "x", "--size", "1Gi", "--fs", "zfs")...).mustSay(t, 2, `"zfs"`, "btrfs\"\n")
	drover(t, kubeconfig("volume", "list", "--nosuch")...).mustSay(t, 2, "--nosuch", "drover volume list --help")
}

// TestCompletion: completion offers names of objects and values of flags.
func TestCompletion(t *testing.T) {
	t.Setenv("DROVER_KUBECONFIG", server.Kubeconfig)
	v := &api.Volume{Spec: api.VolumeSpec{Size: 10 << 20}}
	v.Name = "typed"
	img := &api.BackingImage{Spec: api.BackingImageSpec{SourceType: api.SourceUpload}}
	img.Name = "typed-image"
	n := &api.Node{Spec: api.NodeSpec{Disks: []api.DiskSpec{{Path: "/typed/disk"}}}}
	n.Name = "typed-node"
	target := newTarget("typed-target")
	b := newBackup("typed-backup", "typed", "typed-target")
	for _, o := range []client.Object{v, img, n, target, b} {
		if err := store.Create(t.Context(), o); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = store.Delete(context.Background(), o) })
	}
	for typed, want := range map[string]string{
		"volume show ty":                       "typed\n",
		"volume create x --image ty":           "typed-image\n",
		"target show ty":                       "typed-target\n",
		"backup create ty":                     "typed\n",
		"backup create typed --target ty":      "typed-target\n",
		"backup list --volume ty":              "typed\n",
		"backup delete ty":                     "typed-backup\n",
		"volume create x --from ty":            "typed\n",
		"volume create x --fs x":               "xfs\n",
		"volume create x --auto-balance le":    "least-effort\n",
		"volume attach typed --node typed":     "typed-node\n",
		"volume list -o y":                     "yaml\n",
		"image export typed-image f --format ": "qcow2\n",
		"disk evict /ty":                       "/typed/disk\n",
		"image cleanup typed-image --disk /":   "/typed/disk\n",
	} {
		argv := append([]string{"__complete"}, strings.Split(typed, " ")...)
		drover(t, argv...).mustSay(t, 0, want)
	}
}

func TestServerAway(t *testing.T) {
	t.Setenv("DROVER_KUBECONFIG", "/nosuch/kubeconfig")
	drover(t, "volume", "list").mustSay(t, 6, "/nosuch/kubeconfig")
	raw, err := os.ReadFile(server.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	host := strings.TrimPrefix(server.Config.Host, "https://")
	path := t.TempDir() + "/kubeconfig"
	if err := os.WriteFile(path, []byte(strings.ReplaceAll(string(raw), host, "127.0.0.1:1")), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("DROVER_KUBECONFIG", path)
	drover(t, "volume", "list").mustSay(t, 6, "127.0.0.1:1 does not answer", "drover serve")
}
