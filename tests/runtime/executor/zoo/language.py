"""Language models of transformers at tiny width, from their own configurations."""

from __future__ import annotations

from typing import Any

from zoo.libraries import N_TOKENS, VOCABULARY, from_config, models_of, with_labels

# By the names that most configurations know.
_SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
_ENDS = {"bos_token_id": 1, "eos_token_id": 2}
_POSITIONS = {"max_position_embeddings": N_TOKENS}
_GPT: dict[str, Any] = {**_SIZES, **_POSITIONS}
_TEXT: dict[str, Any] = {**_GPT, **_ENDS, "intermediate_size": 24, "pad_token_id": 0}
_GROUPED = {**_TEXT, "num_key_value_heads": 2, "head_dim": 4}
_SHIFTED = {**_TEXT, "max_position_embeddings": N_TOKENS + 2, "pad_token_id": 1}
_T5: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 1,
    "num_heads": 4, "decoder_start_token_id": 0,
}  # fmt: skip


def _encoder_decoder(**more: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 24,
        "decoder_ffn_dim": 24, "pad_token_id": 0, "decoder_start_token_id": 2, **_ENDS,
        **_POSITIONS, **more,
    }  # fmt: skip


_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertForSequenceClassification", _TEXT),
    "bert_mlm": ("BertForMaskedLM", _TEXT),
    "roberta": ("RobertaForSequenceClassification", _SHIFTED),
    "distilbert": ("DistilBertForSequenceClassification", {**_GPT, "hidden_dim": 24}),
    "albert": ("AlbertForSequenceClassification", {**_TEXT, "embedding_size": 8}),
    "electra": ("ElectraForSequenceClassification", {**_TEXT, "embedding_size": 8}),
    "gpt2": ("GPT2LMHeadModel", {**_GPT, **_ENDS}),
    "gpt_neo": ("GPTNeoForCausalLM", {
        **_GPT, **_ENDS, "attention_types": [[["global", "local"], 1]], "window_size": 4,
    }),
    "gpt_neox": ("GPTNeoXForCausalLM", _TEXT),
    "gptj": ("GPTJForCausalLM", {**_GPT, "rotary_dim": 2, **_ENDS}),
    "opt": ("OPTForCausalLM", {**_TEXT, "ffn_dim": 24, "word_embed_proj_dim": 16}),
    "bloom": ("BloomForCausalLM", {**_SIZES, **_ENDS}),
    "llama": ("LlamaForCausalLM", _GROUPED),
    "llama_eager": ("LlamaForCausalLM", {**_GROUPED, "attn_implementation": "eager"}),
    "mistral": ("MistralForCausalLM", {**_GROUPED, "sliding_window": 4}),
    "qwen2": ("Qwen2ForCausalLM", _GROUPED),
    "qwen3": ("Qwen3ForCausalLM", _GROUPED),
    "gemma": ("GemmaForCausalLM", _GROUPED),
    "gemma2": ("Gemma2ForCausalLM", {**_GROUPED, "sliding_window": 4}),
    "phi": ("PhiForCausalLM", {**_TEXT, "num_key_value_heads": 4}),
    "phi3": ("Phi3ForCausalLM", _GROUPED),
    "falcon": ("FalconForCausalLM", {**_TEXT, "alibi": False}),
    "stablelm": ("StableLmForCausalLM", _GROUPED),
    "mixtral": ("MixtralForCausalLM", {
        **_GROUPED, "num_experts_per_tok": 2, "num_local_experts": 4,
    }),
    "t5": ("T5ForConditionalGeneration", _T5),
    "bart": ("BartForConditionalGeneration", _encoder_decoder()),
    "pegasus": ("PegasusForConditionalGeneration", _encoder_decoder()),
    "deberta_v2": ("DebertaV2ForTokenClassification", {
        **_TEXT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 4,
    }),
    "gpt2_classes": ("GPT2ForSequenceClassification", {**_GPT, "pad_token_id": 0}),
    "funnel": ("FunnelForSequenceClassification", {
        "vocab_size": VOCABULARY, "d_model": 16, "block_sizes": [1, 1], "n_head": 4, "d_head": 4,
        "d_inner": 24,
    }),
    "mobilebert": ("MobileBertForMaskedLM", {
        **_TEXT, "embedding_size": 8, "intra_bottleneck_size": 16,
    }),
    "squeezebert": ("SqueezeBertForSequenceClassification", {**_TEXT, "embedding_size": 16}),
    "fnet": ("FNetForSequenceClassification", _TEXT),
    "convbert": ("ConvBertForSequenceClassification", {
        **_TEXT, "embedding_size": 16, "conv_kernel_size": 3,
    }),
    "mpnet": ("MPNetForSequenceClassification", _SHIFTED),
    "modernbert": ("ModernBertForMaskedLM", {
        **_TEXT, "local_attention": 4, "sep_token_id": 2, "cls_token_id": 1,
    }),
    "xlnet": ("XLNetForSequenceClassification", {
        "vocab_size": VOCABULARY, "d_model": 16, "n_layer": 2, "n_head": 4, "d_inner": 24,
    }),
    "gemma3": ("Gemma3ForCausalLM", {**_GROUPED, "sliding_window": 4}),
    "cohere": ("CohereForCausalLM", _GROUPED),
    "granite": ("GraniteForCausalLM", _GROUPED),
    "olmo2": ("Olmo2ForCausalLM", _GROUPED),
    "persimmon": ("PersimmonForCausalLM", _TEXT),
    "gpt_oss": ("GptOssForCausalLM", {
        **_GROUPED, "num_experts_per_tok": 2, "num_local_experts": 4, "sliding_window": 4,
    }),
    "gpt_bigcode": ("GPTBigCodeForCausalLM", _GPT),
    "openai_gpt": ("OpenAIGPTLMHeadModel", _GPT),
    "ctrl": ("CTRLLMHeadModel", {**_GPT, "dff": 24}),
    "mamba2": ("Mamba2ForCausalLM", {
        "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_heads": 8,
        "head_dim": 4, "state_size": 4, "n_groups": 1, "chunk_size": 4, "pad_token_id": 0,
    }),
    "mpt": ("MptForCausalLM", {**_SIZES, "max_seq_len": N_TOKENS}),
    # Its loss explodes from larger weights.
    "mt5": ("MT5ForConditionalGeneration", {**_T5, "initializer_factor": 0.05}),
    "mbart": ("MBartForConditionalGeneration", _encoder_decoder()),
    "longformer": ("LongformerForMaskedLM", {**_SHIFTED, "attention_window": 4}),
    "led": ("LEDForConditionalGeneration", _encoder_decoder(
        attention_window=4, max_encoder_position_embeddings=N_TOKENS,
        max_decoder_position_embeddings=N_TOKENS,
    )),
    "xlm": ("XLMForSequenceClassification", _GPT),
}  # fmt: skip

_LABELLED = {
    **{f"{name}_labels": _MODELS[name] for name in ("bert", "gpt2", "llama", "t5")},
    "bert_span": ("BertForQuestionAnswering", _TEXT),
}

LANGUAGE = models_of(_LABELLED, with_labels) | models_of(_MODELS, from_config)
