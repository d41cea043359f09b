package egress_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/egress"
)

// patience is how long a test waits for what must happen.
const patience = 20 * time.Second

// rig is the egress of one node, and the world outside of it.
type rig struct {
	t       testing.TB
	proxy   *egress.Proxy
	keeper  *egress.Keeper
	records *ledger
	names   *names
	world   *world
	clock   *clock
	serving sync.WaitGroup

	mu       sync.Mutex
	profiles []boxed.EgressProfile
	secrets  map[string]boxed.Secret
	values   map[string]string // by owner/name
	boxes    int
}

// rigConfig is what a test may have otherwise.
type rigConfig struct {
	Proxy  egress.Config
	Keeper egress.KeeperConfig
	Judge  egress.JudgeConfig
}

const (
	rigNode  = boxed.NodeID("aaaaaaaaaaaaaaaa")
	rigOwner = "alice@example.com"
)

func newRig(t testing.TB, changes ...func(*rigConfig)) *rig {
	t.Helper()
	r := &rig{
		t: t, records: &ledger{t: t}, names: newNames(), world: newWorld(), clock: &clock{},
		secrets: map[string]boxed.Secret{}, values: map[string]string{},
	}
	var c rigConfig
	c.Proxy = egress.Config{
		Node: rigNode, Records: r.records, Resolver: r.names, Roots: worldCA().pool, Now: r.clock.now,
		Times: egress.Times{Hello: patience, Drain: patience},
	}
	c.Keeper.Now, c.Keeper.Node = r.clock.now, rigNode
	log := slog.New(slog.NewJSONHandler(&r.records.log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	c.Proxy.Log, c.Keeper.Log = log, log
	for _, change := range changes {
		change(&c)
	}
	c.Proxy.Judge = egress.NewJudge(c.Judge)
	r.proxy = egress.New(c.Proxy)
	r.proxy.SetWorld(r.world.judge, r.world.dial)
	sealer, err := egress.NewSealer(make([]byte, 32))
	if err != nil {
		t.Fatal(err)
	}
	c.Keeper.Proxy, c.Keeper.Sealer = r.proxy, sealer
	r.keeper = egress.NewKeeper(c.Keeper)
	t.Cleanup(func() {
		r.proxy.Close()
		r.serving.Wait()
		r.world.close()
		r.records.holdsNoSecret()
	})
	return r
}

// times are those of a rig.
func times(change func(*egress.Times)) func(*rigConfig) {
	return func(c *rigConfig) { change(&c.Proxy.Times) }
}

// limits are those of a rig.
func limits(l egress.Limits) func(*rigConfig) {
	return func(c *rigConfig) { c.Proxy.Limits = l }
}

// profile adds a profile, or replaces the one of its name.
func (r *rig) profile(p boxed.EgressProfile) {
	r.t.Helper()
	p.Version = 1
	checked, err := egress.CheckProfile(p)
	if err != nil {
		r.t.Fatal(err)
	}
	r.mu.Lock()
	r.profiles = append(slices.DeleteFunc(r.profiles, func(o boxed.EgressProfile) bool { return o.Name == p.Name && o.Owner == p.Owner }), *checked)
	list := slices.Clone(r.profiles)
	r.mu.Unlock()
	r.keeper.SetProfiles(list)
}

// secret sets a secret, or rotates it. No record may ever hold its value.
func (r *rig) secret(s boxed.Secret, value string) {
	r.t.Helper()
	if s.Owner == "" {
		s.Owner = rigOwner
	}
	r.records.hide(value)
	r.mu.Lock()
	key := s.Owner + "/" + s.Name
	r.secrets[key], r.values[key] = s, value
	list := r.heldLocked()
	r.mu.Unlock()
	r.keeper.SetSecrets(list)
}

func (r *rig) heldLocked() (list []egress.HeldSecret) {
	for _, key := range slices.Sorted(maps.Keys(r.secrets)) {
		list = append(list, egress.HeldSecret{Secret: r.secrets[key], Read: func() egress.Value {
			r.mu.Lock()
			defer r.mu.Unlock()
			return egress.NewValue(r.values[key])
		}})
	}
	return list
}

// revoke ends the use of a secret.
func (r *rig) revoke(owner, name string) {
	r.mu.Lock()
	s := r.secrets[owner+"/"+name]
	s.RevokedAt = time.Now()
	r.secrets[owner+"/"+name] = s
	list := r.heldLocked()
	r.mu.Unlock()
	r.keeper.SetSecrets(list)
}

// box is a sandbox, as the programs in it see its egress.
type box struct {
	r     *rig
	id    boxed.ID
	grant *boxed.EgressGrant
}

// box makes a sandbox.
func (r *rig) box(spec boxed.EgressSpec) *box {
	r.t.Helper()
	b, err := r.tryBox(rigOwner, spec)
	if err != nil {
		r.t.Fatal(err)
	}
	return b
}

func (r *rig) tryBox(owner string, spec boxed.EgressSpec) (*box, error) {
	r.mu.Lock()
	r.boxes++
	id := boxed.ID(fmt.Sprintf("box%07d-%s", r.boxes, rigNode))
	r.mu.Unlock()
	grant, err := r.keeper.Attach(&boxed.Sandbox{ID: id, Owner: owner}, &spec)
	return &box{r, id, grant}, err
}

// ruled makes a sandbox with a profile of its own.
func (r *rig) ruled(rules ...boxed.EgressRule) *box {
	r.t.Helper()
	return r.profiled(boxed.EgressProfile{Rules: rules})
}

func (r *rig) profiled(p boxed.EgressProfile) *box {
	r.t.Helper()
	r.mu.Lock()
	p.Name = fmt.Sprintf("profile-%d", len(r.profiles))
	r.mu.Unlock()
	r.profile(p)
	return r.box(boxed.EgressSpec{Profile: p.Name})
}

// change replaces the rules of the profile that ruled made.
func (b *box) change(rules ...boxed.EgressRule) {
	b.r.t.Helper()
	if rules == nil {
		rules = []boxed.EgressRule{}
	}
	b.r.profile(boxed.EgressProfile{Name: b.grant.Spec.Profile, Rules: rules})
}

// token is the placeholder in a variable. No record may ever hold it.
func (b *box) token(variable string) string {
	b.r.t.Helper()
	token := b.grant.Env[variable]
	if token == "" {
		b.r.t.Fatalf("there is no variable %s in %v", variable, b.grant.Env)
	}
	b.r.records.hide(token)
	return token
}

// clock is a clock that a test moves.
type clock struct {
	mu    sync.Mutex
	ahead time.Duration
}

func (c *clock) now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return time.Now().Add(c.ahead)
}

func (c *clock) advance(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ahead += d
}

// ledger is a Recorder that keeps everything.
type ledger struct {
	t testing.TB

	mu     sync.Mutex
	all    []boxed.EgressRecord
	full   bool // nothing can be recorded
	sudden bool // and nobody could know before it was tried
	hidden []string
	log    logged
}

// logged is what was logged.
type logged struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *logged) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(p)
}

func (l *logged) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.String()
}

var errFull = errors.New("the disk is full")

func (l *ledger) Ready() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.full && !l.sudden {
		return errFull
	}
	return nil
}

func (l *ledger) Allow(rec boxed.EgressRecord) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.full {
		return errFull
	}
	l.all = append(l.all, rec)
	return nil
}

func (l *ledger) Deny(rec boxed.EgressRecord) {
	l.mu.Lock()
	defer l.mu.Unlock()
	rec.Allowed = false
	l.all = append(l.all, rec)
}

func (l *ledger) End(rec boxed.EgressRecord) {
	l.mu.Lock()
	defer l.mu.Unlock()
	rec.End = true
	l.all = append(l.all, rec)
}

func (l *ledger) Forget(boxed.ID) {}

func (l *ledger) setFull(full, sudden bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.full, l.sudden = full, sudden
}

// of are the records that match.
func (l *ledger) of(match func(boxed.EgressRecord) bool) (recs []boxed.EgressRecord) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, rec := range l.all {
		if match(rec) {
			recs = append(recs, rec)
		}
	}
	return recs
}

func isDenied(rec boxed.EgressRecord) bool { return !rec.Allowed && !rec.End }
func isOpened(rec boxed.EgressRecord) bool { return rec.Allowed && !rec.End }

// denied is the newest denial of a sandbox.
func (l *ledger) denied(id boxed.ID) (rec boxed.EgressRecord) {
	if list := l.of(func(r boxed.EgressRecord) bool { return isDenied(r) && r.Sandbox == id }); len(list) > 0 {
		rec = list[len(list)-1]
	}
	return rec
}

// ended waits for the end of something, for a reason.
func (l *ledger) ended(t testing.TB, reason boxed.EgressReason) boxed.EgressRecord {
	t.Helper()
	return l.await(t, "end for "+string(reason), func(r boxed.EgressRecord) bool { return r.End && r.Reason == reason })
}

func (l *ledger) await(t testing.TB, what string, match func(boxed.EgressRecord) bool) (rec boxed.EgressRecord) {
	t.Helper()
	eventually(t, "record of the "+what, func() bool {
		list := l.of(match)
		if len(list) > 0 {
			rec = list[0]
		}
		return len(list) > 0
	})
	return rec
}

// hide is what must not be in a record.
func (l *ledger) hide(text string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.hidden = append(l.hidden, text)
}

// holdsNoSecret holds at the end of every test.
func (l *ledger) holdsNoSecret() {
	l.t.Helper()
	for _, rec := range l.of(func(boxed.EgressRecord) bool { return true }) {
		text, err := json.Marshal(rec)
		if err != nil {
			l.t.Error(err)
		}
		for _, h := range l.hidden {
			if h != "" && strings.Contains(string(text), h) {
				l.t.Errorf("a record holds a placeholder or a credential: %s", text)
				return
			}
		}
	}
	for _, h := range l.hidden {
		if text := l.log.String(); h != "" && strings.Contains(text, h) {
			l.t.Errorf("the log holds a placeholder or a credential: %s", text)
		}
	}
}

// eventually waits for what must come true.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("there is no %s", what)
		}
	}
}
