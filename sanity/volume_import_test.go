package sanity_test

import (
	"bytes"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
)

// volumeImports: the file of an exported volume becomes a volume with the same bytes again, from raw and qcow2, also a
// larger one, whose end is zeros. No image is left. An import that fails, that asks for too small a volume, or that is
// interrupted leaves nothing.
func volumeImports(t *testing.T, w *world) {
	w.set("allow-private-image-sources", "true")
	p, err := w.create("origin", 64*mib, blockCap())
	must(t, err)
	must(t, p.up())
	d := openDevice(t, p, 64*mib)
	d.write(0, 3*mib)
	d.write(41*mib+4096, 8192)
	d.write(62*mib, 2*mib)
	must(t, d.f.Close())
	must(t, p.down())
	raw, packed := w.path("exported.raw"), w.path("exported.qcow2")
	w.must("volume", "export", "origin", raw)
	w.must("volume", "export", "origin", packed, "--format", "qcow2", "--compress")

	w.must("volume", "import", raw)
	w.must("volume", "import", packed, "--name", "larger", "--size", "96Mi", "--label", "team=db")
	if v := w.volume("larger"); v.Labels["team"] != "db" || v.Spec.Size != 96*mib {
		t.Errorf("labels %v, size %d", v.Labels, v.Spec.Size)
	}
	w.must("volume", "create", "cloned", "--from", "exported")
	for volume, size := range map[string]int64{"exported": 64 * mib, "larger": 96 * mib, "cloned": 64 * mib} {
		file := w.path(volume + "-again.raw")
		w.must("volume", "export", volume, file)
		got, err := os.ReadFile(file)
		must(t, err)
		if want := append(bytes.Clone(d.want), make([]byte, size-64*mib)...); !bytes.Equal(got, want) {
			t.Errorf("volume %s has %d bytes, and not those of the file", volume, len(got))
		}
	}

	w.refused(2, "is less than the 64 MiB", "volume", "import", packed, "--name", "small", "--size", "32Mi")
	w.refused(1, "wrong checksum", "volume", "import", raw, "--name", "wrong", "--checksum", strings.Repeat("0", 128))
	interruptedImport(t, w)
	for _, left := range []string{"small", "wrong", "slow"} {
		w.refused(3, "does not exist", "volume", "show", left)
	}
	must(t, p.remove())
	w.must("volume", "delete", "cloned", "larger", "exported")
	w.awaitNoLayers(t)
	if out := w.must("image", "list", "--all"); strings.Contains(out, "restore-") {
		t.Errorf("hidden images are left: %s", out)
	}
}

// interruptedImport interrupts a command whose server never sends the whole file.
func interruptedImport(t *testing.T, w *world) {
	asked := make(chan bool, 100)
	server := httptest.NewServer(http.HandlerFunc(func(out http.ResponseWriter, r *http.Request) {
		out.Header().Set("Content-Length", strconv.FormatInt(64*mib, 10))
		_, _ = out.Write(make([]byte, 8*mib))
		_ = http.NewResponseController(out).Flush()
		asked <- true
		<-r.Context().Done()
	}))
	defer server.Close()
	cmd := exec.Command(drover(t), "volume", "import", server.URL+"/slow.raw", "--kubeconfig",
		w.path("state", "kubeconfig"), "--timeout", settle.String())
	var said bytes.Buffer
	cmd.Stdout, cmd.Stderr = &said, &said
	must(t, cmd.Start())
	<-asked
	must(t, cmd.Process.Signal(os.Interrupt))
	_ = cmd.Wait()
	if code := cmd.ProcessState.ExitCode(); code != 130 || !strings.Contains(said.String(), `volume "slow" is not imported`) {
		t.Errorf("exit code %d: %s", code, said.String())
	}
}
