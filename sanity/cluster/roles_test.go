package cluster

import (
	"bufio"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"drover.io/drover/api"
	"drover.io/drover/api/await"
)

// TestRoles: the roles of a node run in the controller's process, or in separate processes.
func TestRoles(t *testing.T) {
	c := start(t, Options{Nodes: 1, AllRoles: true})
	m, err := c.machine("apart", 50)
	must(t, err)
	c.Others = append(c.Others, m)
	must(t, m.addDisk(Disk{}))
	must(t, m.Serve(t.Context(), "--roles", "node", "--kubeconfig", c.join(), "--disk", m.Disks[0].Path))
	data := m.Command(t.Context(), program, "serve", "--roles", "data", "--kubeconfig", c.join(), "--node-name", m.Name,
		"--state-dir", filepath.Join(m.Dir, "data"), "--metrics-listen", "off")
	data.Stderr = m.log
	out, err := data.StdoutPipe()
	must(t, err)
	must(t, data.Start())
	defer func() { _ = data.Wait() }() // the process ends with the machine
	defer func() { _ = m.Signal(syscall.SIGKILL) }()
	ready := false
	for lines := bufio.NewScanner(out); !ready && lines.Scan(); {
		ready = strings.HasPrefix(lines.Text(), "ready ")
	}
	if !ready {
		t.Fatalf("a process of the data role alone is not ready\n%s", m.LogTail())
	}
	for _, on := range []*Machine{c.Control, c.Nodes[0], m} {
		_, err := await.Until(soon(t), c.Objects, on.Name, nodeReady)
		must(t, err)
		v := &api.Volume{Spec: api.VolumeSpec{Size: 64 << 20, Nodes: []string{on.Name}}}
		v.Name = "on-" + on.Name
		must(t, c.Objects.Create(t.Context(), v))
		awaitVolume(t, c, v.Name, "made", func(v *api.Volume) bool { return len(v.Status.Members) == 1 })
		c.attach(t, v.Name, on.Name)
		var a api.Attachment
		must(t, c.Objects.Get(t.Context(), client.ObjectKey{Name: v.Name}, &a))
		f, err := os.OpenFile(a.Status.Device, os.O_RDWR|os.O_SYNC, 0)
		must(t, err)
		_, err = f.WriteAt([]byte(on.Name), 4096)
		must(t, errors.Join(err, f.Close()))
		c.detach(t, v.Name)
	}

	// Every process has a certificate of the same authority; the machine with two processes has two.
	eventually(t, "every process has a certificate", func() bool {
		var certs api.NodeCertificateList
		must(t, c.Objects.List(t.Context(), &certs))
		have := map[string]int{}
		for _, cert := range certs.Items {
			if cert.Status.Certificate != "" {
				have[cert.Spec.Node]++
			}
		}
		return have["control"] == 1 && have["node-1"] == 1 && have["apart"] == 2
	})
}
